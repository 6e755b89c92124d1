"""The real engine behind the real server, one for each module; every test must give everything back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from engine.engine import Engine
from rpc.client import Client
from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.conftest import Serving
from tests.rpc.real import CHECKPOINT, engine_config, make_checkpoint

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

    def start(self, prompt: list[int] = PROMPT, request_id: str = "", **fields: Any) -> grpc.aio.UnaryStreamCall:
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), request_id=request_id, include_usage=True)
        message.sampling.CopyFrom(LONG)
        message.sampling.MergeFrom(pb.SamplingParams(**fields))
        return self.client.generate(message)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def real(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Real]:
    engine = Engine(engine_config(make_checkpoint(tmp_path_factory.mktemp("tiny"))))
    async with serving(engine) as served:
        yield Real(engine, served.client, served.port)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def gives_everything_back(real: Real) -> AsyncIterator[None]:
    """And before the end of LONG: what was left has been aborted."""
    before = (await real.engine.stats()).generation_tokens
    yield
    await real.idle()
    assert (await real.engine.stats()).generation_tokens - before < LONG.max_tokens


def joined(deltas: list[pb.Delta]) -> dict[int, dict[str, Any]]:
    """Each choice's deltas, concatenated."""
    choices: dict[int, dict[str, Any]] = {}
    for d in deltas:
        c = choices.setdefault(d.index, {"ids": [], "text": "", "logprobs": [], "prompt_logprobs": []})
        c["ids"] += d.token_ids
        c["text"] += d.text
        for name in ("logprobs", "prompt_logprobs"):
            c[name] += [[(t.token_id, t.logprob, t.rank) for t in p.tokens] for p in getattr(d, name)]
        c |= {"finish": d.finish_reason, "cumulative_logprob": d.cumulative_logprob}
    return choices


async def over_grpc(real: Real, prompt: list[int], params: dict[str, Any]) -> dict[int, dict[str, Any]]:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(**params))
    return joined([d async for r in real.client.generate(request) for d in r.deltas])
