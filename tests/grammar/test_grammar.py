"""Grammars and masks, with the demo model's tokenizer, against llguidance used directly."""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engine.errors import InvalidRequest
from engine.grammar import grammar as grammar_module
from engine.grammar.grammar import JSON_OPTIONS, GrammarCompiler
from engine.grammar.masks import Masks
from engine.plan import StepResult
from engine.request.params import SamplingParams
from engine.request.structured import StructuredOutputs
from engine.text.tokenizer import TextTokenizer
from tests.grammar.conftest import EOS, VOCAB

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}


@pytest.fixture(scope="module")
def matchers(tokenizer: TextTokenizer) -> Any:
    """Makes matchers of llguidance's own."""
    ll = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=VOCAB, eos_token=EOS)
    return lambda source: llguidance.LLMatcher(ll, source)


def result(*token_ids: int) -> StepResult:
    return StepResult(1, np.array(token_ids, np.int32), np.zeros(len(token_ids), np.bool_), None, None, 0.0)


def allowed(mask: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")).tolist()


def spelled(tokenizer: TextTokenizer, mask: Any) -> set[str]:
    return {tokenizer.token_text(i) for i in allowed(mask)}


@pytest.mark.parametrize(
    ("wanted", "source"),
    [
        (StructuredOutputs(json=SCHEMA), llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, defaults=JSON_OPTIONS)),
        (
            StructuredOutputs(json_object=True),
            llguidance.LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=JSON_OPTIONS),
        ),
        (StructuredOutputs(regex="(ab|[0-9]+,)*"), llguidance.LLMatcher.grammar_from_regex("(ab|[0-9]+,)*")),
        (
            StructuredOutputs(choice=['say "no"', "a\n", "é"]),
            llguidance.LLMatcher.grammar_from_lark(r'start: "say \"no\"" | "a\n" | "é"'),
        ),
        (StructuredOutputs(grammar='start: "x"*'), llguidance.LLMatcher.grammar_from_lark('start: "x"*')),
    ],
)
def test_masks_along_a_walk_are_llguidances(
    compiler: GrammarCompiler, matchers: Any, wanted: StructuredOutputs, source: str
) -> None:
    """Random walks, the row beside others: one of another grammar, and some without."""
    masks = Masks(8, VOCAB, compiler.vocab_size)
    drawn = random.Random(3)
    for _ in range(3):
        mine = compiler.compile(wanted).fork()
        other = compiler.compile(StructuredOutputs(regex="[a-z]{99}")).fork()
        matcher = matchers(source)
        for _ in range(40):
            rows = [(2, mine), (4, other)]
            filled = masks.fill(5, rows)
            assert filled.shape == (5, VOCAB // 32)
            assert allowed(filled[2]) == allowed(np.frombuffer(matcher.compute_bitmask(), np.uint8))
            assert (filled[[0, 1, 3]] == 0xFFFFFFFF).all()
            token = drawn.choice(allowed(filled[2]))
            assert matcher.consume_token(token)
            masks.advance([(0, mine)], result(token))
            assert mine.has_ended == matcher.is_stopped()
            if mine.has_ended:
                break


def test_forks_part_where_they_were_made(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    masks = Masks(2, VOCAB, compiler.vocab_size)
    start = compiler.compile(StructuredOutputs(regex="[ab]{2}")).fork()
    start.advance(tokenizer.encode("a")[0])
    first, second = start.fork(), start.fork()
    masks.advance([(0, first)], result(tokenizer.encode("b")[0]))
    assert (first.has_ended, second.has_ended) == (True, False)
    assert spelled(tokenizer, masks.fill(1, [(0, second)])[0]) == {"a", "b"}


def test_the_end_may_come_only_where_the_grammar_accepts(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    masks = Masks(1, VOCAB, compiler.vocab_size)
    row = compiler.compile(StructuredOutputs(regex="a(bc)?")).fork()
    assert spelled(tokenizer, masks.fill(1, [(0, row)])[0]) == {"a", "ab", "abc"} & {
        tokenizer.token_text(i) for i in range(VOCAB)
    }
    masks.advance([(0, row)], result(tokenizer.encode("a")[0]))
    assert EOS in allowed(masks.fill(1, [(0, row)])[0])
    masks.advance([(0, row)], result(tokenizer.encode("b")[0]))
    assert EOS not in allowed(masks.fill(1, [(0, row)])[0])
    assert not row.has_ended


def test_under_ignore_eos_only_a_grammar_that_can_only_end_ends(
    compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    masks = Masks(2, VOCAB, compiler.vocab_size)
    goes_on = compiler.compile(StructuredOutputs(regex="a*")).fork((EOS,))
    can_only_end = compiler.compile(StructuredOutputs(grammar='start: ""')).fork((EOS,))
    filled = masks.fill(2, [(0, goes_on), (1, can_only_end)])
    assert spelled(tokenizer, filled[0]) >= {"a", "aa"}
    assert EOS not in allowed(filled[0])
    assert allowed(filled[1]) == [EOS]
    masks.advance([(0, can_only_end)], result(EOS))
    assert can_only_end.has_ended and can_only_end.error is None


def test_many_rows_are_filled_by_several_threads(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    words = ["red", "green", "blue"]
    rows = [(i, compiler.compile(StructuredOutputs(choice=[words[i % 3]])).fork()) for i in range(0, 200, 2)]
    filled = Masks(200, VOCAB, compiler.vocab_size).fill(200, rows)
    for index in range(200):
        if index % 2:
            assert (filled[index] == 0xFFFFFFFF).all()
        else:
            longest = max(spelled(tokenizer, filled[index]), key=len)
            assert longest
            assert words[index % 3].startswith(longest)


def test_a_mask_that_takes_too_long_is_the_last(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = Masks(1, VOCAB, compiler.vocab_size)
    row = compiler.compile(StructuredOutputs(regex="a+")).fork()
    a = tokenizer.encode("a")[0]
    masks.fill(1, [(0, row)])
    masks.advance([(0, row)], result(a))
    assert (row.error, row.has_ended) == (None, False)
    clock = iter((0.0, 0.2))
    monkeypatch.setattr("engine.grammar.grammar.time.thread_time", lambda: next(clock))
    masks.fill(1, [(0, row)])
    masks.advance([(0, row)], result(a))
    assert str(row.error).startswith("structured_outputs.regex: too complex")
    assert row.has_ended  # with this token; the loop makes an error of it


def test_masks_that_slow_a_step_down_end_their_requests_and_no_other(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 14 ms may come seven times in a request; fifty in a step take 0.7 s, and are the last."""
    masks, grammar = Masks(51, VOCAB, compiler.vocab_size), compiler.compile(StructuredOutputs(regex="a+"))
    a = tokenizer.encode("a")[0]

    def steps(seconds: list[float], num_steps: int) -> list[bool]:
        """Whether each row has failed after so many steps, in which its masks take so long."""
        times = [t for _ in range(num_steps) for duration in seconds for t in (0.0, duration)]
        clock = iter(times)
        monkeypatch.setattr("engine.grammar.grammar.time.thread_time", lambda: next(clock))
        monkeypatch.setattr(masks, "_pool", ThreadPoolExecutor(1))
        rows = [(i, grammar.fork()) for i in range(len(seconds))]
        for _ in range(num_steps):
            masks.fill(len(rows), rows)
            masks.advance(rows, result(*[a] * len(rows)))
        return [row.error is not None for _, row in rows]

    assert steps([0.014], 7) == [False]
    assert steps([0.014], 8) == [True]
    assert steps([0.0001] * 51, 20) == [False] * 51
    assert steps([0.014] * 50 + [0.0001], 1) == [True] * 50 + [False]


def test_what_llguidance_gives_up_in_the_middle_names_the_field(
    compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    """The repetitions that it cannot count come behind digits, where the first mask does not see them."""
    masks = Masks(1, VOCAB, compiler.vocab_size)
    row = compiler.compile(StructuredOutputs(regex="[0-9]{4}(a{1000}){1000}")).fork()
    for token in tokenizer.encode("1234aa"):
        masks.fill(1, [(0, row)])
        masks.advance([(0, row)], result(token))
        if row.has_ended:
            break
    assert row.error is not None
    assert row.error.field == "structured_outputs.regex"
    # On a slow machine its masks have taken too long before that.
    assert "too many expressions" in str(row.error) or "too complex" in str(row.error)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1,"b":"x"}', True),
        ('{ "a" : 1 , "b" : "x" }', True),
        ('{\n    "a": 1,\n    "b": "x"\n}', True),
        ('{\r\n\t"a": 1,\r\n\t"b": "x"\r\n}', True),
        ('{"a":1,\n\n"b":"x"}', False),
        ('{"a":  1,"b":"x"}', False),
        ("{\n" + " " * 33 + '"a": 1', False),
    ],
)
def test_white_space_in_json_has_an_end(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, text: str, fits: bool
) -> None:
    grammar = compiler.compile(StructuredOutputs(json=SCHEMA)).fork()
    for token in tokenizer.encode(text):
        if grammar.error is None:
            grammar.advance(token)
    assert (grammar.error is None) == fits
    assert grammar.has_ended


@pytest.mark.parametrize("padding", [1, 33, 200])
def test_padding_of_the_models_vocabulary_is_never_allowed(tokenizer: TextTokenizer, padding: int) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB + padding, [EOS])
    row = compiler.compile(StructuredOutputs(regex="(?s:.*)")).fork()
    mask = Masks(1, VOCAB + padding, compiler.vocab_size).fill(1, [(0, row)])[0]
    assert mask.shape == (-(-(VOCAB + padding) // 32),)
    assert len(allowed(mask)) > VOCAB - 1000
    assert max(allowed(mask)) < VOCAB


def test_a_model_with_fewer_ids_than_its_tokenizer(tokenizer: TextTokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 1000, [EOS])
    row = compiler.compile(StructuredOutputs(regex="[a-z]+")).fork()
    assert Masks(1, 1000, compiler.vocab_size).fill(1, [(0, row)]).shape == (1, 32)


DEEP = '{"type": "array", "items": ' * 300 + "{}" + "}" * 300


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        pytest.param({"regex": "(a{1000}){1000}"}, "too complex", marks=pytest.mark.slow),
        ({"grammar": "start: other"}, "unknown name"),
        ({"grammar": "start "}, "Expected"),
        ({"json": {"type": "strin"}}, "Invalid type"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "http://example.com/x"}}, "not present"),
        ({"json": {"type": "integer", "multipleOf": 982451653}}, "fuel exhausted"),
        ({"json": DEEP}, "recursion limit"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_field(
    compiler: GrammarCompiler, wanted: dict[str, Any], reason: str
) -> None:
    given = StructuredOutputs(**wanted)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler.compile(given)
    assert str(caught.value).startswith(f"structured_outputs.{given.kind}: ")
    assert not compiler.has(given)


def test_the_grammars_used_last_are_kept(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "CACHED_GRAMMARS", 2)
    compiler = GrammarCompiler(tokenizer, VOCAB, [EOS])
    a, b, c = (StructuredOutputs(regex=text) for text in "abc")
    first = compiler.compile(a)
    compiler.compile(b)
    assert compiler.compile(a) is first
    compiler.compile(c)
    assert [compiler.has(x) for x in (a, b, c)] == [True, False, True]


def test_a_tokenizer_that_llguidance_cannot_read_is_an_error_of_the_request() -> None:
    words = TextTokenizer(Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(InvalidRequest, match=r"structured_outputs: not with this model's tokenizer: .*decoder"):
        GrammarCompiler(words, 2, [0]).compile(StructuredOutputs(regex="a"))


def test_without_llguidance_the_extra_is_named(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(tokenizer, VOCAB, [EOS])
    with pytest.raises(InvalidRequest, match=r"structured_outputs: .*engine-llm\[structured\]"):
        compiler.compile(StructuredOutputs(json_object=True))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar; found none"),
        ({"json": "{}", "regex": "a"}, "exactly one"),
        ({"json": "{"}, r"structured_outputs\.json: not a JSON schema"),
        ({"json": "[1]"}, r"structured_outputs\.json: a schema is a JSON object"),
        ({"json": {"a": {1}}}, r"structured_outputs\.json: not a JSON schema"),
        ({"json": json.dumps({"pattern": "x" * 70_000})}, r"structured_outputs\.json: .*65536"),
        ({"json": json.dumps({"description": "x" * (1 << 20)})}, r"structured_outputs\.json: .*1048576"),
        ({"json": "[" * 60_000}, r"structured_outputs\.json: not a JSON schema"),
        ({"json_object": 1}, r"structured_outputs\.json_object"),
        ({"regex": ""}, r"structured_outputs\.regex: must be a string of 1 to 65536"),
        ({"regex": 7}, r"structured_outputs\.regex"),
        ({"regex": "\ud800"}, r"structured_outputs\.regex: holds a lone surrogate"),
        ({"choice": ["a", "\udfff"]}, r"structured_outputs\.choice: holds a lone surrogate"),
        ({"grammar": "x" * 65_537}, r"structured_outputs\.grammar"),
        ({"choice": []}, r"structured_outputs\.choice: must be a list of 1 to 1024"),
        ({"choice": "yes"}, r"structured_outputs\.choice"),
        ({"choice": ["a", ""]}, r"structured_outputs\.choice"),
        ({"choice": ["x" * 40_000] * 2}, r"structured_outputs\.choice: at most 65536 characters in all"),
    ],
)
def test_malformed_constraints_are_refused_at_construction(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StructuredOutputs(**wanted)


def test_beams_are_not_constrained() -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs: cannot be combined with use_beam_search"):
        SamplingParams(use_beam_search=True, structured_outputs=StructuredOutputs(regex="a"))
