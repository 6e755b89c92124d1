"""Every sampling field, as it reaches the engine."""

import asyncio
import json
from dataclasses import fields
from typing import Any

import pytest

from engine.request.params import SamplingParams
from engine.request.structured import StructuredOutputs
from loader.generation import GenerationConfig
from tests.rpc.http.conftest import Http

GIVEN: dict[str, Any] = {
    "n": 2, "best_of": 3, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
    "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "seed": 2**62, "stop": ["a", "b"],
    "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True, "max_tokens": 9, "min_tokens": 3,
    "logprobs": 2, "skip_special_tokens": False, "logit_bias": {"7": -1}, "allowed_token_ids": [3, 4],
    "bad_words": ["no"], "truncate_prompt_tokens": 5, "length_penalty": 2.0,
    "structured_outputs": {"regex": "a+"},
}  # fmt: skip
NOT_OVER_HTTP = {
    "prompt_logprobs",  # echo with logprobs
    "detokenize",  # an answer is text
    "use_beam_search",  # below: it excludes others
    "early_stopping",
}


async def params_of(http: Http, path: str = "/v1/completions", **body: Any) -> SamplingParams:
    call = asyncio.create_task(http.client.post(path, json=body))
    request = await http.next_request()
    for index in range(request.params.n):
        request.finish("x", [1], index=index)
    assert (await call).status_code == 200
    return request.params


async def test_every_field_arrives(http: Http) -> None:
    assert GIVEN.keys() | NOT_OVER_HTTP == {f.name for f in fields(SamplingParams)}
    expected = GIVEN | {"logit_bias": {7: -1}, "structured_outputs": StructuredOutputs(regex="a+")}
    assert await params_of(http, prompt="x", **GIVEN) == SamplingParams(**expected)


async def test_beam_search(http: Http) -> None:
    assert (await params_of(http, prompt="x", use_beam_search=True, n=2)).use_beam_search


async def test_a_field_of_zero_is_zero(http: Http) -> None:
    params = await params_of(http, prompt="x", temperature=0, seed=0, logprobs=0, top_k=0, max_tokens=0)
    assert params == SamplingParams(temperature=0, seed=0, logprobs=0, top_k=0, max_tokens=0)


async def test_the_models_own_defaults_hold_where_nothing_is_given(http: Http) -> None:
    http.engine.checkpoint.generation = GenerationConfig(eos_token_ids=(), temperature=0.5, top_p=0.75, top_k=20)
    assert await params_of(http, prompt="x") == SamplingParams(temperature=0.5, top_p=0.75, top_k=20)
    params = await params_of(http, prompt="x", temperature=0, top_p=1, top_k=-1)
    assert (params.temperature, params.top_p, params.top_k) == (0, 1, -1)


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        ({"response_format": {"type": "json_object", "schema": {"type": "array"}}}, {"json": {"type": "array"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'start: "a"', "regex": None}}, {"grammar": 'start: "a"'}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "x"}, {"grammar": "x"}),
        ({"guided_grammar": "x", "response_format": {"type": "text"}}, {"grammar": "x"}),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_constraints(shared_http: Http, body: dict[str, Any], constraint: dict[str, Any] | None) -> None:
    expected = None if constraint is None else StructuredOutputs(**constraint)
    params = await params_of(shared_http, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **body)
    assert params.structured_outputs == expected
