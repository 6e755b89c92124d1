"""The server over a fake engine, and a stub of the router's service on its port."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from tests.router.checkpoint import make_checkpoint
from tests.router.fake_engine import RoutedEngine
from tests.rpc.conftest import Served, Serving, serving

__all__ = ["serving"]


@dataclass
class Routed:
    """What a test of the service needs."""

    engine: RoutedEngine
    served: Served
    stub: pb_grpc.VllmEngineStub


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("router-model"))


@pytest.fixture
async def routed(serving: Serving, model: Path) -> AsyncIterator[Routed]:
    engine = RoutedEngine(model)
    async with serving(engine) as served, grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        yield Routed(engine, served, pb_grpc.VllmEngineStub(channel))
