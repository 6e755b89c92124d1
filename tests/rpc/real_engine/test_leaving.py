"""R01, R03: what clients leave behind, by cancelling, dying and deadlines."""

import asyncio
import sys

import grpc
import pytest

from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.real import ROOT, word
from tests.rpc.real_engine.conftest import LONG, PROMPT, Real

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
