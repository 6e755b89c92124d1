import json
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.chat import ChatTemplate
from engine.text.tool_formats import TOOL_FORMATS, TOOL_PARSERS, tool_format
from engine.text.tools import TextDelta, ToolCallArguments, ToolCallStart, ToolEvent, tool_parser

TEMPLATES = Path(__file__).parent / "templates"

NAMES = {"get_weather", "clock", "f", "fé", "8"}
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2]}}'
CLOCK = '{"name": "clock", "arguments": {}}'


def parse(format: str, *fragments: str, names: Collection[str] = NAMES) -> tuple[str, list[tuple[str, str]]]:
    """The text outside of calls, and each call's name and arguments, of a text that comes in fragments."""
    parser = tool_parser(format, names)
    events: list[ToolEvent] = [event for fragment in fragments for event in parser.feed(fragment)]
    events += parser.finish()
    text, calls = "", list[list[str]]()
    for event in events:
        match event:
            case TextDelta(more):
                assert more
                text += more
            case ToolCallStart(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case ToolCallArguments(index, more):
                assert more
                assert index == len(calls) - 1
                calls[index][1] += more
    return text, [(name, arguments) for name, arguments in calls]


def wrapped(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("No call here.", "No call here.", []),
        ("", "", []),
        (" \n", " \n", []),
        (wrapped(WEATHER), "", [("get_weather", '{"city": "Paris", "days": [1, 2]}')]),
        (wrapped(WEATHER, CLOCK), "", [("get_weather", '{"city": "Paris", "days": [1, 2]}'), ("clock", "{}")]),
        ("Let me see.\n\n" + wrapped(CLOCK) + "\nDone.", "Let me see.Done.", [("clock", "{}")]),
        ("<tool_call>" + CLOCK, "", [("clock", "{}")]),
        ("<tool_call>" + CLOCK + "so", "so", [("clock", "{}")]),
        (wrapped('{"name": "clock", "arguments": null}'), "", [("clock", "{}")]),
        (wrapped('{"name": "clock", "arguments": ""}'), "", [("clock", "{}")]),
        (wrapped('{"name": "f", "arguments": "{\\"x\\": 1}"}'), "", [("f", '{"x": 1}')]),
        (wrapped('{"arguments": {"a": "é"}, "name": "f"}'), "", [("f", '{"a": "é"}')]),
        (wrapped('{"name": "f", "arguments": {"a": "}</tool_call>\\""}}'), "", [("f", '{"a": "}</tool_call>\\""}')]),
        (wrapped('{"name": "f\\u00e9", "arguments": {"a": "x\ny"}, "id": 7}'), "", [("fé", '{"a": "x\ny"}')]),
        # cut off by max_tokens: the arguments so far
        ('<tool_call>{"name": "f", "arguments": {"a": "Par', "", [("f", '{"a": "Par')]),
        # no calls: not a character is lost
        (" <tool_call>\nget_weather\n</tool_call> ", " <tool_call>\nget_weather\n</tool_call> ", []),
        (wrapped('{"name": 8, "arguments": {}}'), wrapped('{"name": 8, "arguments": {}}'), []),
        (wrapped('{"name": "clock"}'), wrapped('{"name": "clock"}'), []),
        (wrapped('{"name": "other", "arguments": {}}'), wrapped('{"name": "other", "arguments": {}}'), []),
        (wrapped('{"name": ["f"], "arguments": {}}'), wrapped('{"name": ["f"], "arguments": {}}'), []),
        (wrapped('{"name": "f", "arguments": "[1]"}'), wrapped('{"name": "f", "arguments": "[1]"}'), []),
        (wrapped('{"name": "f", "arguments": "x"}'), wrapped('{"name": "f", "arguments": "x"}'), []),
        (wrapped('{"name": "f", "arguments": {]}'), "]}\n</tool_call>", [("f", "{")]),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call><tool_call>" + CLOCK, "<tool_call>", [("clock", "{}")]),
        ('<tool_call>{"name": "x', '<tool_call>{"name": "x', []),
        ('<tool_call>{"a <tool_call>' + CLOCK, '<tool_call>{"a', [("clock", "{}")]),
    ],
)
def test_hermes(text: str, rest: str, calls: list[tuple[str, str]]) -> None:
    assert parse("hermes", text) == (rest, calls)
    assert parse("hermes", *text) == (rest, calls)


CALL = '{"name": "f", "parameters": {"x": 1}}'


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("Just text, {not} a call.", "Just text, {not} a call.", []),
        (" \n", " \n", []),
        (CALL, "", [("f", '{"x": 1}')]),
        ("\n\n" + CALL + "\n", "", [("f", '{"x": 1}')]),
        ("<|python_tag|>" + CALL, "", [("f", '{"x": 1}')]),
        ("I call: <|python_tag|> " + CALL, "I call:", [("f", '{"x": 1}')]),
        (f"{CALL}; {CALL}", "", [("f", '{"x": 1}')] * 2),
        (f"{CALL}\n{CALL}", "", [("f", '{"x": 1}')] * 2),
        (f"{CALL};<|python_tag|>{CALL}", "", [("f", '{"x": 1}')] * 2),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('  {"name": "Ann"', '  {"name": "Ann"', []),
        (f"{CALL} That is {CALL}", f"That is {CALL}", [("f", '{"x": 1}')]),
        ('<|python_tag|>brave_search.call(query="x")', '<|python_tag|>brave_search.call(query="x")', []),
    ],
)
def test_llama3_json(text: str, rest: str, calls: list[tuple[str, str]]) -> None:
    assert parse("llama3_json", text) == (rest, calls)
    assert parse("llama3_json", *text) == (rest, calls)


def test_arguments_stream_as_they_come() -> None:
    parser = tool_parser("hermes", NAMES)
    assert parser.feed('Hi <tool_call>{"name": "f", "argum') == [TextDelta("Hi")]
    assert parser.feed('ents": {"a": ') == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": ')]
    assert parser.feed("[1, ") == [ToolCallArguments(0, "[1, ")]
    assert parser.feed("2]}}</tool") == [ToolCallArguments(0, "2]}")]
    assert parser.feed("_call>") == []
    assert parser.finish() == []


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    parser = tool_parser("hermes", NAMES)
    assert parser.feed("one <to") == [TextDelta("one")]
    assert parser.feed("two") == [TextDelta(" <totwo")]
    assert parser.feed(" three <") == [TextDelta(" three")]
    assert parser.finish() == [TextDelta(" <")]


def test_a_json_answer_streams_from_its_first_key_on() -> None:
    parser = tool_parser("llama3_json", NAMES)
    assert parser.feed('{"an') == []
    assert parser.feed('swer": ') == [TextDelta('{"answer":')]


PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            ";",
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ":",
            ",",
            " ",
            "\n",
            "<",
        ),
        *("x", '"name"', '"arguments": ', '"parameters": ', '{"name": "f", ', WEATHER, CLOCK, CALL, '{"a": '),
    ]
)


@pytest.mark.parametrize("format", TOOL_PARSERS)
@given(pieces=st.lists(PIECES, max_size=12), cuts=st.lists(st.integers(0, 200)))
def test_fragments_change_nothing(format: str, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    fragments = [text[a:b] for a, b in pairwise(edges)]
    whole = parse(format, text)
    assert parse(format, *fragments) == whole
    assert parse(format, *text) == whole
    if not whole[1]:
        assert whole[0] == text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON_VALUES, max_size=3)), max_size=3)


@pytest.mark.slow
@given(calls=CALLS, ascii=st.booleans(), size=st.integers(1, 20))
def test_round_trip(calls: list[tuple[str, dict[str, Any]]], ascii: bool, size: int) -> None:
    hermes = wrapped(*(json.dumps({"name": n, "arguments": a}, ensure_ascii=ascii) for n, a in calls))
    llama = "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=ascii) for n, a in calls)
    for format, text in (("hermes", hermes), ("llama3_json", llama)):
        fragments = [text[i : i + size] for i in range(0, len(text), size)]
        rest, found = parse(format, *fragments, names={name for name, _ in calls})
        assert rest == ""
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("format", TOOL_PARSERS)
def test_a_forced_call_is_found(format: str) -> None:
    """The text that `calls_grammar` allows is one that the parser reads."""
    made = TOOL_FORMATS[format]
    call = made.head.replace("{}", '"f"') + '{"x": 1}}'
    before, between, behind = made.around
    assert parse(format, before + call + between + call + behind) == ("", [("f", '{"x": 1}')] * 2)


@pytest.mark.slow
def test_a_long_text_costs_time_in_proportion() -> None:
    """Nothing is searched from its start again for each fragment: a name of 200 kB, then 100,000 markers."""
    parser = tool_parser("hermes", NAMES)
    parser.feed('<tool_call>{"name": "')
    for _ in range(100_000):
        assert parser.feed("ab") == []
    parser.feed('", "arguments": {}}')
    assert parse("hermes", "<tool_call>" * 100_000)[1] == []


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("qwen2.5", "hermes"),
        ("qwen3", "hermes"),
        ("llama-3.1", "llama3_json"),
        ("llama-3", None),
        ("glm-4.5", None),
        ("mistral-v0.3", None),
        ("smollm2", None),
    ],
)
def test_the_format_is_the_one_the_template_writes(template: str, format: str | None) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert tool_format(ChatTemplate((TEMPLATES / f"{template}.jinja").read_text(), tokens)) == format
