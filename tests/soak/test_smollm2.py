"""Soak of the whole: requests on SmolLM2 over gRPC with cancels, disconnects and preemptions; nothing leaks."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from rpc.client import Client
from rpc.options import ServerOptions
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.server import Server
from tests.conftest import GOLDEN
from tests.system.harness import is_clean

BLOCK_BYTES = 2 * 30 * 3 * 64 * 2 * 16
"""K and V, 30 layers, 3 KV heads, 64 wide, bfloat16, 16 tokens."""
LONGEST = 24
AT_ONCE = 16


def prompts() -> list[list[int]]:
    """Five of the golden ones, and longer ones that begin alike."""
    golden = np.load(GOLDEN / "smollm2-135m-instruct" / "golden.npz")
    short = [golden[f"prompt_{k}"].tolist() for k in range(5)]
    head = [i for prompt in short for i in prompt]
    return [*short, head[:33], head[:40], [*head[:20], *short[0]], [*head[:17], *short[3]]]


@dataclass
class Soak:
    """A server, what each prompt gives alone, and what was seen."""

    engine: Engine
    address: str
    rng: random.Random
    alone: list[tuple[list[int], list[int]]]
    num_exact: int = 0
    num_left: int = 0

    async def worker(self, work: list[int]) -> None:
        while work:
            work.pop()
            async with Client(self.address) as client:
                await self.request(client)

    async def request(self, client: Client) -> None:
        """Read to the end, or leave by cancelling the call or by closing the connection."""
        rng = self.rng
        prompt, wanted = rng.choice(self.alone)
        count, n = rng.randint(1, LONGEST), rng.choice([1, 1, 1, 3])
        sampling = pb.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, n=n)
        if rng.random() < 0.1:
            sampling.prompt_logprobs = 1
        message = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt), sampling=sampling, priority=rng.choice([0, 0, 1])
        )
        call = client.generate(message)
        leave = rng.choice([None, None, "cancel", "disconnect"])
        patience = rng.randint(0, count)
        outputs: dict[int, list[int]] = {i: [] for i in range(n)}
        try:
            if leave and not patience:
                await self._leave(client, call, leave)
                return
            async for response in call:
                for delta in response.deltas:
                    outputs[delta.index] += delta.token_ids
                patience -= 1
                if leave and not patience:
                    await self._leave(client, call, leave)
                    break
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            if not leave:
                raise
        for output in outputs.values():
            assert output == wanted[: len(output)]
            assert leave or len(output) == count
        self.num_exact += not leave

    async def _leave(self, client: Client, call: grpc.aio.UnaryStreamCall, how: str) -> None:
        self.num_left += 1
        if how == "cancel":
            call.cancel()
        else:
            await client.__aexit__(None, None, None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_requests_that_come_and_go_leak_nothing(smollm2: Path, soak_requests: int) -> None:
    """R01, K04, K10: every stream that was read to its end is what its prompt gives alone."""
    config = EngineConfig(
        model=str(smollm2),
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=12,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=13 * BLOCK_BYTES,
        long_prefill_token_threshold=24,
    )
    engine = Engine(config)
    server = Server(engine, ServerOptions(port=0, http_port=None))
    port = await server.start()
    run = asyncio.create_task(server.run())
    try:
        async with Client(f"127.0.0.1:{port}") as client:
            await client.wait_serving(120)
            assert engine.info.num_blocks == 13
            alone = [(prompt, await _alone(client, prompt)) for prompt in prompts()]
            await engine.reset_prefix_cache()
        soak = Soak(engine, f"127.0.0.1:{port}", random.Random(1), alone)
        work = list(range(soak_requests))
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(soak.worker(work))
        assert await is_clean(engine)
        assert soak.num_exact + soak.num_left == soak_requests
        assert min(soak.num_exact, soak.num_left) > soak_requests // 5
        assert engine._loop is not None and engine._loop.roster.num_preemptions > 0
    finally:
        server.stop()
        await asyncio.wait([run])


async def _alone(client: Client, prompt: list[int]) -> list[int]:
    sampling = pb.SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
    call = client.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling))
    return [token async for response in call for delta in response.deltas for token in delta.token_ids]
