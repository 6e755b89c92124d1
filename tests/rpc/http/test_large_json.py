"""Answers with many log-probabilities: the same JSON, made in another thread in slices."""

import asyncio
import json
import threading
from typing import Any

import pytest

from engine.request.outputs import Logprob
from rpc.http.large_json import LARGE, SLICE, encode, is_large
from tests.rpc.http.conftest import Http
from tests.rpc.http.stream import all_events


@pytest.mark.parametrize("count", [0, 1, SLICE, SLICE + 1, 5 * SLICE])
def test_the_slices_are_the_json(count: int) -> None:
    positions = [{"token": 'é"\n', "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [{}, {"a": None}]}] * count
    body = {
        "id": "x",
        "choices": [{"logprobs": {"content": positions}, "n": 1.5}, {"logprobs": None}],
        "e": {},
        "l": [],
    }
    made = asyncio.run(encode(body))
    assert json.loads(made) == body
    assert made == json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def test_what_is_large() -> None:
    assert not is_large({"object": "list"}) and not is_large({"choices": [{"logprobs": None}]})
    for name in ("content", "tokens"):
        assert is_large({"choices": [{}, {"logprobs": {name: [1] * (LARGE + 1)}}]})
        assert not is_large({"choices": [{"logprobs": {name: [1] * LARGE}}]})


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_of_4000_tokens(http: Http, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """No call of the encoder in the loop's thread has more than LARGE positions, elsewhere none more than SLICE."""
    http.engine.info.max_model_len, limit = 8192, http.engine.info.max_model_len
    longest: dict[bool, int] = {True: 0, False: 0}
    dumps, main = json.dumps, threading.get_ident()

    def noted(value: Any, **options: Any) -> str:
        if isinstance(value, list):
            in_loop = threading.get_ident() == main
            longest[in_loop] = max(longest[in_loop], len(value))
        return dumps(value, **options)

    monkeypatch.setattr("rpc.http.large_json.json.dumps", noted)
    body = {"prompt": [1] * 4000, "echo": True, "logprobs": 5, "max_tokens": 1, "stream": stream}
    call = asyncio.create_task(http.client.post("/v1/completions", json=body))
    request = await http.next_request()
    position = {i: Logprob(-float(i), i, f"t{i}") for i in range(1, 6)}
    request.push("", prompt_logprobs=(None, *[position] * 3999))
    request.finish("x", [1], logprobs=(position,))
    answer = await call
    found = (await all_events(answer))[:-1] if stream else [answer.json()]
    tokens = [token for each in found for token in (each["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]
    assert len(tokens) == 4001
    assert 0 < longest[False] <= SLICE and longest[True] <= LARGE
    http.engine.info.max_model_len = limit
