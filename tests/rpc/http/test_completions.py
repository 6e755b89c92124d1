"""/v1/completions: prompts in all their forms, echo, logprobs, several choices."""

import asyncio
from typing import Any

import pytest
from openai.types import Completion

from engine.request.outputs import Logprob
from engine.request.params import SamplingParams
from tests.rpc.fake_engine import Submission
from tests.rpc.http.conftest import Http
from tests.rpc.http.stream import all_events

PATH = "/v1/completions"


def post(http: Http, **body: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(http.client.post(PATH, json={"model": "tiny", "prompt": "ab"} | body))


async def requests(http: Http, number: int) -> list[Submission]:
    return [await http.next_request() for _ in range(number)]


async def test_the_whole_answer(http: Http) -> None:
    call = post(http)
    (request,) = await requests(http, 1)
    assert request.prompt == [1, 97, 98] and request.params == SamplingParams()
    request.push("c", [9], num_cached_tokens=2)
    request.finish("d", [9], finish_reason="length")
    answer = await call
    body = answer.json()
    assert body.pop("id") == f"cmpl-{answer.headers['x-request-id']}" and isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "cd", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    Completion.model_validate(answer.json())


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("a", [[1, 97]]),
        (["a", "b"], [[1, 97], [1, 98]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a", [6, 7]], [[1, 97], [6, 7]]),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_is_text_or_ids_or_several(shared_http: Http, prompt: Any, ids: list[list[int]]) -> None:
    call = post(shared_http, prompt=prompt)
    submitted = await requests(shared_http, len(ids))
    assert [request.prompt for request in submitted] == ids
    for i, request in reversed([*enumerate(submitted)]):
        request.finish(f"answer {i}", [1])
    body = (await call).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(i, f"answer {i}") for i in range(len(ids))]
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids)) and body["usage"]["completion_tokens"] == len(ids)


async def test_special_tokens_can_be_left_out(http: Http) -> None:
    call = post(http, add_special_tokens=False)
    (request,) = await requests(http, 1)
    assert request.prompt == [97, 98]
    request.finish()
    await call


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_two_prompts_are_numbered_through(http: Http, stream: bool) -> None:
    call = post(http, prompt=["a", "b"], n=2, stream=stream)
    for p, request in enumerate(await requests(http, 2)):
        for i in range(2):
            request.finish(f"{p}{i}", [1], index=i)
    answer = await call
    choices = [c for e in (await all_events(answer))[:-1] for c in e["choices"]] if stream else answer.json()["choices"]
    assert {c["index"]: c["text"] for c in choices} == {0: "00", 1: "01", 2: "10", 3: "11"}


POSITIONS = (
    {7: Logprob(-1.5, 2, "cd"), 8: Logprob(-0.5, 1, "x")},
    {9: Logprob(-2.5, 3, "\ufffd"), 8: Logprob(-0.75, 1, "\ufffd"), 7: Logprob(-1.0, 2, "\ufffd")},
)
LISTS = {
    "text_offset": [0, 2],
    "tokens": ["cd", "\ufffd"],
    "token_logprobs": [-1.5, -2.5],
    "top_logprobs": [{"cd": -1.5, "x": -0.5}, {"\ufffd": -0.75}],  # of equal texts the likeliest
}


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(http: Http, stream: bool) -> None:
    call = post(http, logprobs=1, stream=stream)
    (request,) = await requests(http, 1)
    assert (request.params.logprobs, request.params.prompt_logprobs) == (1, None)
    for (i, position), text in zip(enumerate(POSITIONS), ("cd", ""), strict=True):
        request.push(text, [i], logprobs=(position,))
    request.finish()
    answer = await call
    choices = [e["choices"][0] for e in (await all_events(answer))[:-1]] if stream else [answer.json()["choices"][0]]
    assert {name: [item for c in choices for item in c["logprobs"][name]] for name in LISTS} == LISTS


async def test_echo_begins_with_the_prompt(http: Http) -> None:
    for prompt in ("ab", [97, 98]):
        call = post(http, prompt=prompt, echo=True, n=2)
        (request,) = await requests(http, 1)
        assert request.params.prompt_logprobs is None
        for i in range(2):
            request.push("c", [99], index=i)
            request.finish("d", [100], index=i)
        assert [c["text"] for c in (await call).json()["choices"]] == ["abcd", "abcd"]


async def test_echo_of_what_a_cut_prompt_has_left(http: Http) -> None:
    call = post(http, prompt="abcd", echo=True, truncate_prompt_tokens=2)
    (request,) = await requests(http, 1)
    request.finish("e", [101])
    assert (await call).json()["choices"][0]["text"] == "cde"


async def test_echo_with_logprobs_scores_a_prompt(http: Http) -> None:
    """What evaluation tools do: nothing is known of the first token, and nothing is produced."""
    call = post(http, prompt=[98, 7], echo=True, logprobs=1, max_tokens=0)
    (request,) = await requests(http, 1)
    assert (request.params.max_tokens, request.params.logprobs, request.params.prompt_logprobs) == (0, 1, 1)
    request.finish("", (), finish_reason="length", prompt_logprobs=(None, POSITIONS[0]), logprobs=())
    choice = (await call).json()["choices"][0]
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "tokens": ["b", "cd"],
        "token_logprobs": [None, -1.5],
        "top_logprobs": [None, {"cd": -1.5, "x": -0.5}],
    }


async def test_every_choice_has_the_prompts_logprobs(http: Http) -> None:
    call = post(http, prompt=[98, 7], echo=True, logprobs=1, n=2)
    (request,) = await requests(http, 1)
    request.finish("x", [8], prompt_logprobs=(None, POSITIONS[0]), logprobs=(POSITIONS[1],))
    request.finish("y", [8], index=1, logprobs=(POSITIONS[1],))
    for choice in (await call).json()["choices"]:
        assert choice["logprobs"]["tokens"] == ["b", "cd", "\ufffd"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 3]


async def test_if_one_prompt_is_refused_none_is_computed(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, calls = http.engine.generate, []

    def refuse_the_third(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            http.engine.refusal = ValueError("broken")
        return generate(*args, **kwargs)

    monkeypatch.setattr(http.engine, "generate", refuse_the_third)
    answer = await http.client.post(PATH, json={"prompt": ["a", "b", "c"]})
    assert answer.status_code == 500
    assert {await http.engine.aborts.get() for _ in range(2)} == {s.request_id for s in await requests(http, 2)}
