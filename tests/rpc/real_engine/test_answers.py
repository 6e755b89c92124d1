"""gRPC gives what the engine gives, whether little or much."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from engine.engine import Engine
from engine.errors import OverCapacity
from engine.request.outputs import Delta
from engine.request.params import SamplingParams
from rpc import convert
from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.real import engine_config, make_checkpoint, word
from tests.rpc.real_engine.conftest import GOLDEN, PROMPT, Real, joined, over_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def in_process(real: Real, prompt: list[int], params: dict[str, Any]) -> dict[int, dict[str, Any]]:
    deltas: list[Delta] = [d async for d in real.engine.generate(prompt, SamplingParams(**params))]
    return joined([message for d in deltas for message in convert.delta_messages(d)])


@pytest.mark.parametrize("k", range(7))
async def test_greedy_ids_are_the_golden_ones(real: Real, k: int) -> None:
    prompt, expected = GOLDEN[f"prompt_{k}"].tolist(), GOLDEN[f"greedy_{k}"].tolist()
    params = {"temperature": 0, "max_tokens": len(expected), "ignore_eos": True}
    assert (await over_grpc(real, prompt, params))[0]["ids"] == expected


@pytest.mark.parametrize(
    "params",
    [
        {"n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 20},
        {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 7, "max_tokens": 12},
        {"n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0, "max_tokens": 12},
        {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.8, "seed": 1, "max_tokens": 10},
        {"stop": ["word-number-1"], "temperature": 1.0, "seed": 3, "max_tokens": 200, "ignore_eos": True},
    ],
    ids=["n", "best_of", "beams", "logprobs", "stop"],
)
async def test_grpc_gives_what_the_engine_gives(real: Real, params: dict[str, Any]) -> None:
    remote, local = await asyncio.gather(over_grpc(real, PROMPT, params), in_process(real, PROMPT, params))
    assert remote == local
    assert sorted(remote) == list(range(params.get("n", 1)))
    assert all(c["ids"] and c["finish"] for c in remote.values())
    if "prompt_logprobs" in params:
        positions = remote[0]["prompt_logprobs"]
        assert [p[0][0] for p in positions[1:]] == PROMPT[1:] and positions[0] == []
        assert len(remote[0]["logprobs"]) == len(remote[0]["ids"])


async def test_text_is_the_decoded_ids(real: Real) -> None:
    words = " ".join(map(word, PROMPT))
    request = pb.GenerateRequest(text=words, sampling=pb.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    out = joined([d async for r in real.client.generate(request) for d in r.deltas])[0]
    assert out["text"].split() == [word(i) for i in out["ids"]]
    assert (
        out["ids"] == (await over_grpc(real, PROMPT, {"temperature": 0, "max_tokens": 8, "ignore_eos": True}))[0]["ids"]
    )


async def test_the_second_time_the_cache_serves_the_prompt(real: Real) -> None:
    await real.engine.reset_prefix_cache()
    cached = []
    for _ in range(2):
        responses = [r async for r in real.start(max_tokens=1)]
        cached.append(responses[-1].usage.cached_tokens)
    assert cached == [0, len(PROMPT) // 16 * 16]
    stats = await real.client.stats()
    assert stats.num_cached_blocks >= len(PROMPT) // 16
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


async def test_lower_priority_goes_first(real: Real) -> None:
    running = [real.start() for _ in range(8)]
    await real.until(num_running=8)
    order: list[str] = []

    async def finish(name: str, priority: int) -> None:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), priority=priority)
        async for _ in real.client.generate(request):
            pass
        order.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(finish("later", 2))
        await real.until(num_waiting=1)
        group.create_task(finish("sooner", 1))
        await real.until(num_waiting=2)
        running[0].cancel()  # one row for two
    assert order == ["sooner", "later"]
    for call in running:
        call.cancel()


async def test_a_profile_of_the_server(real: Real) -> None:
    await real.client.start_profile()
    await over_grpc(real, PROMPT, {"max_tokens": 5, "ignore_eos": True})
    events = json.loads(await real.client.stop_profile())["traceEvents"]
    assert sum(e["name"] == "launch" for e in events) >= 5


async def test_settings_of_the_door_reach_it(tmp_path: Path) -> None:
    config = engine_config(make_checkpoint(tmp_path), stream_interval=4, max_queued_requests_per_tenant=1)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    async with Engine(config) as engine:
        sizes = [len(d.token_ids) async for d in engine.generate(PROMPT, params)]
        assert sizes[0] == 1 and sum(sizes) == 14 and all(size >= 4 for size in sizes[1:-1])
        first = engine.generate(PROMPT, params, tenant="a")
        with pytest.raises(OverCapacity, match="tenant 'a'"):
            engine.generate(PROMPT, params, tenant="a")
        second = engine.generate(PROMPT, params, tenant="b")
        assert [sum([len(d.token_ids) async for d in s]) for s in (first, second)] == [14, 14]


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("text", pb.GenerateRequest(text=f"{word(7)} " * ((3 << 19) // 14))),
        ("prompt", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 1_000_000))),
    ],
    ids=["1.5 MiB of text", "1M ids"],
)
async def test_a_prompt_that_is_far_too_long_says_the_limit(
    real: Real, field: str, request_: pb.GenerateRequest
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await real.client.generate(request_).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = caught.value.details() or ""
    assert "8192" in details and details.startswith(f"{field}: ")
    assert (await over_grpc(real, PROMPT, {"max_tokens": 1}))[0]["ids"]


async def test_a_reply_above_4_mib_reaches_a_client_with_default_limits(real: Real) -> None:
    prompt = [int(i) for i in np.random.default_rng(0).integers(3, 512, 8000)]
    sampling = pb.SamplingParams(max_tokens=1, prompt_logprobs=20)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
    async with grpc.aio.insecure_channel(real.address) as channel:
        call = channel.unary_stream(
            "/engine.v1.Engine/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        responses = [r async for r in call(request)]
    assert sum(r.ByteSize() for r in responses) > 4 << 20
    positions = [p for r in responses for d in r.deltas for p in d.prompt_logprobs]
    assert [p.tokens[0].token_id for p in positions[1:]] == prompt[1:]
