"""SmolLM2 under grammars through the offline API: what comes out is what was asked for, at temperature 1 too."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine import LLM, SamplingParams, StructuredOutputs
from engine.errors import InvalidRequest, RequestFault
from engine.request.outputs import CompletionOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 12},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
}
COLOURS = {"type": "array", "items": {"enum": ["red", "green", "blue", 7, None]}, "minItems": 2, "maxItems": 4}
EITHER = {
    "anyOf": [
        {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False},
        {"type": "string", "maxLength": 8},
        {"type": "integer", "maximum": 1000},
    ]
}
DATES = {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 1, "maxItems": 2}
NODES = {
    "$defs": {
        "leaf": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "node": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 1, "maxItems": 2},
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: list[dict[str, Any]] = [PERSON, COLOURS, EITHER, DATES, NODES]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), device="cpu", max_model_len=512, max_num_seqs=32, kv_cache_memory_bytes=64 << 20) as llm:
        yield llm


def ask(llm: LLM, *wanted: SamplingParams, prompt: str = "Answer: ") -> list[CompletionOutput]:
    return [out.outputs[0] for out in llm.generate([prompt] * len(wanted), list(wanted), use_tqdm=False)]


def under(seed: int = 0, max_tokens: int = 120, **constraint: Any) -> SamplingParams:
    wanted = StructuredOutputs(**constraint)
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, structured_outputs=wanted)


def test_json_of_every_schema_beside_free_rows_which_it_leaves_alone(llm: LLM) -> None:
    free = [SamplingParams(temperature=1.0, seed=s, max_tokens=60, ignore_eos=True) for s in range(2)]
    alone = [c.token_ids for c in ask(llm, *free)]
    wanted = [(schema, under(seed, json=schema)) for schema in SCHEMAS for seed in range(3)]
    outputs = ask(llm, *free, *(params for _, params in wanted))
    assert [c.token_ids for c in outputs[:2]] == alone
    for (schema, _), output in zip(wanted, outputs[2:], strict=True):
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), schema, format_checker=jsonschema.FormatChecker())
    assert len({c.text for c in outputs[2:]}) > 6


def test_regex_choice_and_grammar(llm: LLM) -> None:
    address = r"[a-z]{2,8}@[a-z]{2,8}\.(com|org)"
    sums = 'start: number ("+" number)~2\nnumber: /[1-9][0-9]?/'
    outputs = ask(
        llm,
        *(under(seed, regex=address) for seed in range(3)),
        *(under(seed, choice=["yes", "no", "not yet"]) for seed in range(3)),
        *(under(seed, grammar=sums) for seed in range(3)),
        under(json_object=True, max_tokens=200),
    )
    for output in outputs[:3]:
        assert re.fullmatch(address, output.text)
    for output in outputs[3:6]:
        assert output.text in ("yes", "no", "not yet")
    for output in outputs[6:9]:
        assert re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?){2}", output.text)
    assert {c.finish_reason for c in outputs[:9]} == {"stop"}
    if outputs[9].finish_reason == "stop":
        assert isinstance(json.loads(outputs[9].text), dict)


def test_choices_of_a_request_go_their_own_ways(llm: LLM) -> None:
    wanted = SamplingParams(n=4, seed=1, max_tokens=20, structured_outputs=StructuredOutputs(regex="[0-9]{6}"))
    (output,) = llm.generate("Number: ", wanted, use_tqdm=False)
    assert all(re.fullmatch("[0-9]{6}", choice.text) for choice in output.outputs)
    assert len({choice.text for choice in output.outputs}) > 1


def test_with_the_other_parameters(llm: LLM) -> None:
    def params(regex: str, **more: Any) -> SamplingParams:
        return SamplingParams(
            **{"seed": 3, "max_tokens": 12, **more}, structured_outputs=StructuredOutputs(regex=regex)
        )

    ids = {text: llm.encode(text) for text in ("red", "green", "a")}
    at_stop, late, forced, endless, cut = ask(
        llm,
        params("[a-z]{1,5},[a-z]{9}", stop=","),
        params("(ab)*", min_tokens=5),
        params("red|green", logit_bias={ids["red"][0]: -100.0}, temperature=0.0),
        params("a*", ignore_eos=True),
        params("[a-z]{400}"),
    )
    assert re.fullmatch("[a-z]{1,5}", at_stop.text)
    assert (at_stop.finish_reason, at_stop.stop_reason) == ("stop", ",")
    assert re.fullmatch("(ab)*a?", late.text)
    assert len(late.token_ids) >= 5
    assert forced.text in ("green", "red")
    assert forced.token_ids[0] != ids["red"][0]
    assert (set(endless.text), endless.finish_reason, len(endless.token_ids)) == ({"a"}, "length", 12)
    assert (re.fullmatch("[a-z]+", cut.text) is not None, cut.finish_reason) == (True, "length")


def test_the_same_request_gives_the_same_text_from_the_prefix_cache(llm: LLM) -> None:
    prompt = "A long prompt, so that its blocks are found in the cache when it comes again. " * 3
    params = under(7, json=PERSON)
    first, second = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens > 0) == (0, True)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_rules_that_leave_no_token_fail_their_request_alone(llm: LLM) -> None:
    wanted = StructuredOutputs(regex="[0-9]+")
    a = llm.encode("a")
    with pytest.raises(RequestFault, match="no token to sample"):
        ask(llm, SamplingParams(structured_outputs=wanted, allowed_token_ids=a))
    assert ask(llm, SamplingParams(structured_outputs=StructuredOutputs(regex="a"), allowed_token_ids=a))[0].text == "a"


def test_a_hostile_constraint_is_refused_by_field(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex: too complex"):
        ask(llm, under(regex="(a{1000}){1000}"))
    with pytest.raises(
        InvalidRequest, match=r"structured_outputs\.json: .*multipleOf|structured_outputs\.json: .*fuel"
    ):
        ask(llm, under(json={"type": "integer", "multipleOf": 982451653}))
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex: .*too many expressions"):
        ask(llm, under(regex="[0-9]{4}(a{1000}){1000}"))  # known after a few tokens only
    assert ask(llm, under(regex="[0-9]{4}"))[0].finish_reason == "stop"
