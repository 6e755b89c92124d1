"""The real router in front of two real engines, over its OpenAI HTTP.

One fleet serves all tests of this file, in their order: the last ones kill, restart and drain its workers.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import APIError, APIStatusError, AsyncStream

from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.real import server_process

pytest.importorskip("smg", reason="the router has no wheel for this platform")

from tests.router.fleet import Fleet, Worker, running_fleet, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
LONG = 1500
IGNORE_EOS = {"ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(model: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(model) as fleet:
        yield fleet


async def chat(fleet: Fleet, content: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    return await fleet.openai.chat.completions.create(
        model=fleet.model, messages=messages, **{"max_tokens": 24, "extra_body": IGNORE_EOS, **more}
    )


async def engine_answer(worker: Worker, prompt: str, max_tokens: int) -> str:
    """What the engine itself says, greedily."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    replies = worker.client.generate(pb.GenerateRequest(text=prompt, sampling=sampling))
    return "".join([delta.text async for reply in replies for delta in reply.deltas])


async def num_running(fleet: Fleet) -> list[int]:
    return [(await w.client.stats()).num_running for w in fleet.workers]


async def is_idle(fleet: Fleet) -> bool:
    return not any(await num_running(fleet))


# -- what an OpenAI client gets ---------------------------------------------------------


async def test_chat(fleet: Fleet) -> None:
    """The client sets no temperature: the model's own default is greedy."""
    answer = await chat(fleet, "Hello")
    expected = await engine_answer(fleet.workers[0], "<|start|>user\nHello<|end|>\n<|start|>assistant\n", 24)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (24, 24)


async def test_chat_streamed(fleet: Fleet) -> None:
    whole = (await chat(fleet, "Hello")).choices[0].message.content
    stream = await chat(fleet, "Hello", stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole and sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 4
    assert chunks[-1].usage.completion_tokens == 24
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]


async def test_completions(fleet: Fleet) -> None:
    ask = fleet.openai.completions.create
    expected = await engine_answer(fleet.workers[1], "Once upon", 16)
    answer = await ask(model=fleet.model, prompt="Once upon", n=2, max_tokens=16, extra_body=IGNORE_EOS)
    assert [c.text for c in answer.choices] == [expected, expected]
    stop = expected.split()[3]
    answer = await ask(model=fleet.model, prompt="Once upon", stop=[stop], max_tokens=16, extra_body=IGNORE_EOS)
    assert answer.choices[0].text == expected[: expected.index(stop)] and answer.choices[0].finish_reason == "stop"
    sampled = [
        (await ask(model=fleet.model, prompt="Once upon", temperature=1.0, seed=s, max_tokens=16)).choices[0].text
        for s in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


async def test_logprobs(fleet: Fleet) -> None:
    answer = await chat(fleet, "Hello", logprobs=True, top_logprobs=2)
    for position in answer.choices[0].logprobs.content:
        assert position.logprob == position.top_logprobs[0].logprob > position.top_logprobs[1].logprob


async def test_an_answer_that_follows_a_json_schema(fleet: Fleet) -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["color", "count"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    answer = await chat(fleet, "A thing?", max_tokens=200, response_format=form, extra_body={})
    assert answer.choices[0].finish_reason == "stop"
    thing = json.loads(answer.choices[0].message.content)
    assert thing.keys() == {"color", "count"} and thing["color"] in ("red", "green") and 1 <= thing["count"] <= 9


async def test_a_bad_request_is_the_clients(fleet: Fleet) -> None:
    with pytest.raises(APIStatusError) as caught:
        await chat(fleet, "Hello", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": []}})
    assert caught.value.status_code == 400
    with pytest.raises(APIStatusError) as caught:
        await chat(fleet, "x" * 9000)
    assert caught.value.status_code == 400


# -- routing ----------------------------------------------------------------------------


async def test_a_prefix_goes_to_where_it_is_cached(fleet: Fleet) -> None:
    """Four prefixes, each asked for three times: by chance all eight would be hits once in 256 times."""
    for n in range(4):
        prefix = f"{n} times " + "lorem ipsum " * 10
        asked = [await _prompts_of(fleet)]
        for ending in ("a", "b", "c"):
            answer = await chat(fleet, prefix + ending)
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached >= (len(prefix) // BLOCK) * BLOCK if ending != "a" else cached < 2 * BLOCK
            await until(lambda: _all_is_known(fleet))
            asked.append(await _prompts_of(fleet))
        gained = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(asked)]
        assert len({g.index(max(g)) for g in gained}) == 1 and all(min(g) == 0 for g in gained)


async def _prompts_of(fleet: Fleet) -> list[int]:
    return [(await w.client.stats()).prompt_tokens for w in fleet.workers]


async def _all_is_known(fleet: Fleet) -> bool:
    """The router's index holds as many blocks of each worker as the worker has cached."""
    known = [await fleet.metric("smg_kv_index_blocks", w) for w in fleet.workers]
    return known == [(await w.client.stats()).num_cached_blocks for w in fleet.workers]


async def test_clients_that_leave_free_their_rows(fleet: Fleet) -> None:
    """A stream's end reaches the engine as an abort, a plain answer's as a cancelled call."""
    stream = await chat(fleet, "stream", max_tokens=8000, stream=True)
    await anext(aiter(stream))
    plain = asyncio.create_task(chat(fleet, "plain", max_tokens=8000))
    await until(lambda: _running(fleet, 2))
    await stream.close()
    await until(lambda: _running(fleet, 1))
    plain.cancel()
    await until(lambda: is_idle(fleet))


async def _running(fleet: Fleet, count: int) -> bool:
    return sum(await num_running(fleet)) == count


# -- workers that leave -----------------------------------------------------------------


_serial = count()


async def streams_on_each(fleet: Fleet) -> list[AsyncStream[Any]]:
    """A stream with its first chunk out on each of two workers, in their order: each has its prompt cached before."""
    contents = [f"{next(_serial)} streams " + "lorem ipsum " * 10 for _ in fleet.workers]
    for worker, content in zip(fleet.workers, contents, strict=True):
        await engine_answer(worker, f"<|start|>user\n{content}<|end|>\n<|start|>assistant\n", 1)
    await until(lambda: _all_is_known(fleet))
    streams = []
    for content in contents:
        stream = await chat(fleet, content, max_tokens=LONG, stream=True)
        await anext(aiter(stream))
        streams.append(stream)
    assert await num_running(fleet) == [1, 1]
    return streams


async def finish_of(stream: AsyncStream[Any]) -> str:
    reasons = [c.choices[0].finish_reason async for c in stream if c.choices]
    return reasons[-1] or ""


async def new_requests(fleet: Fleet) -> None:
    for n in range(6):
        assert (await chat(fleet, f"{n} more")).choices[0].finish_reason == "length"


async def test_a_worker_is_killed(fleet: Fleet) -> None:
    """Its client gets an error; other streams go on, and new requests are served."""
    killed, other = await streams_on_each(fleet)
    fleet.workers[0].process.send_signal(signal.SIGKILL)
    with pytest.raises(APIError):
        await finish_of(killed)
    await new_requests(fleet)
    assert await finish_of(other) == "length"


async def test_the_killed_worker_comes_back_and_the_other_is_drained(fleet: Fleet, model: Path) -> None:
    """Back on its port, with nothing cached: the router takes a snapshot. What runs on the other one ends there."""
    port = fleet.workers[0].address.rpartition(":")[2]
    with server_process(model, "--port", port) as (process, address):
        fleet.workers[0].process = process
        assert address == fleet.workers[0].address
        await fleet.workers[0].client.wait_serving(60)
        await asyncio.to_thread(fleet.log.wait_for, "snapshot applied", 3)
        streams = await streams_on_each(fleet)
        drained = fleet.workers[1].process
        drained.send_signal(signal.SIGTERM)
        await new_requests(fleet)
        assert await asyncio.gather(*map(finish_of, streams)) == ["length", "length"]
        assert await asyncio.to_thread(drained.wait, 60) == 0
        await new_requests(fleet)
