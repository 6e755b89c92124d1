"""The real engine behind the real server: gRPC gives what the engine gives, and gives everything back."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from engine.engine import Engine
from engine.errors import OverCapacity, StepFault
from engine.plan import SampleBatch, StepResult
from engine.publish import LiveRequest
from engine.request import Delta, SamplingParams
from engine.settlement import Settled
from rpc import convert
from rpc.client import Client
from rpc.options import ServerOptions
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.server import Server
from tests.rpc.real import CHECKPOINT, ROOT, engine_config, make_checkpoint, word

pytestmark = pytest.mark.asyncio(loop_scope="module")

GOLDEN = np.load(CHECKPOINT / "golden.npz")
PROMPT = [int(i) for i in GOLDEN["prompt_5"]]
LONG = pb.SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)


class Real:
    """The engine, its server and a client of it."""

    def __init__(self, engine: Engine, client: Client, port: int) -> None:
        self.engine = engine
        self.client = client
        self.address = f"127.0.0.1:{port}"

    async def idle(self) -> None:
        """Wait until no request is left; every block must then be back."""
        while (stats := await self.engine.stats()).num_running or stats.num_waiting or self.engine.has_work:
            await asyncio.sleep(0)
        assert stats.kv_cache_usage == 0.0
        assert await self.engine.audit() == []

    async def until(self, **numbers: int) -> None:
        """Wait until the engine's stats are these."""
        stats = await self.engine.stats()
        while any(getattr(stats, name) != n for name, n in numbers.items()):
            await asyncio.sleep(0)
            stats = await self.engine.stats()

    def start(self, prompt: list[int] = PROMPT, request_id: str = "", **fields: object) -> grpc.aio.UnaryStreamCall:
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), request_id=request_id, include_usage=True)
        message.sampling.CopyFrom(LONG)
        message.sampling.MergeFrom(pb.SamplingParams(**fields))
        return self.client.generate(message)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Real]:
    engine = Engine(engine_config(make_checkpoint(tmp_path_factory.mktemp("tiny"))))
    server = Server(engine, ServerOptions(port=0))
    port = await server.start()
    run = asyncio.create_task(server.run())
    try:
        async with Client(f"127.0.0.1:{port}") as client:
            await client.wait_serving(60)
            yield Real(engine, client, port)
    finally:
        server.stop()
        server.stop()
        await asyncio.wait([run])


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def gives_everything_back(real: Real) -> AsyncIterator[None]:
    yield
    await real.idle()


def joined(deltas: list[pb.Delta]) -> dict[int, dict[str, object]]:
    """Each choice's deltas, concatenated."""
    choices: dict[int, dict[str, object]] = {}
    for d in deltas:
        c = choices.setdefault(d.index, {"ids": [], "text": "", "logprobs": [], "prompt_logprobs": []})
        c["ids"] += d.token_ids
        c["text"] += d.text
        for name in ("logprobs", "prompt_logprobs"):
            c[name] += [[(t.token_id, t.logprob, t.rank) for t in p.tokens] for p in getattr(d, name)]
        c |= {"finish": d.finish_reason, "cumulative_logprob": d.cumulative_logprob}
    return choices


async def over_grpc(real: Real, prompt: list[int], params: dict[str, object]) -> dict[int, dict[str, object]]:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(**params))
    return joined([d async for r in real.client.generate(request) for d in r.deltas])


async def in_process(real: Real, prompt: list[int], params: dict[str, object]) -> dict[int, dict[str, object]]:
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
async def test_grpc_gives_what_the_engine_gives(real: Real, params: dict[str, object]) -> None:
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


# -- R01: what a client leaves behind -------------------------------------------------------


async def test_cancel_after_three_messages(real: Real) -> None:
    call = real.start()
    for _ in range(3):
        await call.read()
    call.cancel()
    await real.idle()


async def test_cancel_while_queued(real: Real) -> None:
    running = [real.start() for _ in range(8)]
    await real.until(num_running=8)
    queued = real.start()
    await real.until(num_waiting=1)
    queued.cancel()
    await real.until(num_waiting=0, num_running=8)
    for call in running:
        call.cancel()


async def test_cancel_during_prefill(real: Real) -> None:
    await real.engine.reset_prefix_cache()
    before = (await real.engine.stats()).generation_tokens
    call = real.start(prompt=[3] * 6000)  # 94 steps
    await real.until(num_running=1)
    call.cancel()
    await real.idle()
    assert (await real.engine.stats()).generation_tokens == before


async def test_a_client_that_is_killed(real: Real) -> None:
    flags = ("--address", real.address, "--max-tokens", "8000", "--ignore-eos", "--temperature", "0")
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine",
        "generate",
        f"{word(5)} {word(6)}",
        *flags,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert client.stdout is not None and await client.stdout.read(1)
    client.kill()
    await client.wait()
    await real.idle()


# -- R03: deadlines -------------------------------------------------------------------------


async def test_a_deadline_in_mid_stream(real: Real) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=LONG)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in real.client.generate(request, timeout=0.2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await real.idle()


@pytest.mark.parametrize("timeout", [0.0, 1e-6])
async def test_a_deadline_that_has_passed_begins_no_work(real: Real, timeout: float) -> None:
    before = (await real.engine.stats()).prefix_cache_queries
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=LONG)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await real.client.generate(request, timeout=timeout).read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await real.engine.stats()).prefix_cache_queries == before


# -- R04: large messages --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("text", pb.GenerateRequest(text=f"{word(7)} " * ((5 << 20) // 14))),
        ("prompt", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 1_000_000))),
    ],
    ids=["5 MiB of text", "1M ids"],
)
async def test_a_prompt_that_is_far_too_long_says_the_limit(
    real: Real, field: str, request_: pb.GenerateRequest
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await real.client.generate(request_).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "8192" in caught.value.details() and caught.value.details().startswith(f"{field}: ")
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


# -- R10: a fault of one request ------------------------------------------------------------


async def outcome(call: grpc.aio.UnaryStreamCall) -> object:
    """The ids of the only choice, or the status."""
    try:
        return joined([d async for r in call for d in r.deltas])[0]["ids"]
    except grpc.aio.AioRpcError as error:
        return error.code()


class BrokenTicket:
    """A ticket whose result `spoil` replaces."""

    def __init__(self, ticket: object, spoil: Callable[[StepResult], StepResult]) -> None:
        self._ticket = ticket
        self._spoil = spoil

    def done(self) -> bool:
        return self._ticket.done()

    async def result(self) -> StepResult:
        return self._spoil(await self._ticket.result())


def break_text(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the text of request "bad" fails at its fourth token."""
    original = LiveRequest._push_delta

    def push_delta(self: LiveRequest, choice: Any, settled: Settled, *more: Any) -> None:
        original(self, choice, settled, *more)
        sequence = settled.sequence
        if self.request_id == "bad" and (push_plain := sequence.push_plain) is not None:

            def push_or_fail(token_id: int) -> None:
                if sequence.num_output == 4:
                    raise ValueError("no such character")
                push_plain(token_id)

            sequence.push_plain = push_or_fail

    monkeypatch.setattr(LiveRequest, "_push_delta", push_delta)


def break_sampling(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of request "bad" hold nothing usable at its fourth token."""
    device, scheduler = real.engine._device, real.engine._loop.scheduler
    original = device.sample

    def sample(batch: SampleBatch) -> object:
        bad = [s.row for s in scheduler.running if s.request_id == "bad" and s.num_output == 3]
        faulted = np.isin(batch.rows, bad)
        return BrokenTicket(original(batch), lambda result: replace(result, faulted=result.faulted | faulted))

    monkeypatch.setattr(device, "sample", sample)


def break_step(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step that request "bad" is in fails as a whole."""
    device, scheduler = real.engine._device, real.engine._loop.scheduler
    original = device.sample
    failed: list[int] = []

    def fail(result: StepResult) -> StepResult:
        raise StepFault("an op failed")

    def sample(batch: SampleBatch) -> object:
        ticket = original(batch)
        if not failed and any(s.request_id == "bad" and s.num_output == 3 for s in scheduler.running):
            failed.append(batch.step)
            return BrokenTicket(ticket, fail)
        return ticket

    monkeypatch.setattr(device, "sample", sample)


@pytest.mark.parametrize("fault", [break_text, break_sampling, break_step])
async def test_a_fault_of_one_request_of_five(
    real: Real, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Real, pytest.MonkeyPatch], None]
) -> None:
    """It ends that request (or those of the step); the others and later ones get what they would have got."""
    prompts = [[5 + i, 6, 7] for i in range(5)]
    expected = [
        (await over_grpc(real, p, {"temperature": 0, "max_tokens": 16, "ignore_eos": True}))[0]["ids"] for p in prompts
    ]
    with monkeypatch.context() as patch:
        fault(real, patch)
        names = ["a", "b", "bad", "c", "d"]
        calls = [real.start(p, name, max_tokens=16) for p, name in zip(prompts, names, strict=True)]
        outcomes = await asyncio.gather(*map(outcome, calls))
    assert outcomes[2] is grpc.StatusCode.INTERNAL
    for got, wanted in zip(outcomes[:2] + outcomes[3:], expected[:2] + expected[3:], strict=True):
        assert got == wanted or (fault is break_step and got is grpc.StatusCode.INTERNAL)
    assert await outcome(real.start(prompts[2], "bad", max_tokens=16)) == expected[2]
