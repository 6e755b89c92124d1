"""A server over a fake engine on a free loopback port; it always stops with its test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from rpc.client import Client
from rpc.clock import Clock
from rpc.options import ServerOptions
from rpc.server import Server
from tests.rpc.fake_engine import FakeEngine


@dataclass
class Served:
    """A running server and everything a test needs to talk to it."""

    engine: FakeEngine
    server: Server
    client: Client
    port: int
    run: asyncio.Task[None]


Serving = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def serving() -> Serving:
    """`async with serving(engine, **options) as served`; `wait=False` does not wait for SERVING."""

    @asynccontextmanager
    async def serve(
        engine: FakeEngine | None = None, *, wait: bool = True, clock: Clock | None = None, **options: Any
    ) -> AsyncIterator[Served]:
        engine = engine or FakeEngine()
        server = Server(engine, ServerOptions(port=0, **{"http_port": None, **options}), clock)
        port = await server.start()
        run = asyncio.create_task(server.run())
        try:
            async with Client(f"127.0.0.1:{port}") as client:
                if wait:
                    await client.wait_serving(30)
                yield Served(engine, server, client, port, run)
        finally:
            server.stop()
            server.stop()
            await asyncio.wait([run])

    return serve


@pytest.fixture
async def served(serving: Serving) -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


async def read(call: Any) -> Any:
    """The next message of a stream."""
    return await call.read()


HealthStub: Any = health_pb2_grpc.HealthStub
ServerReflectionStub: Any = reflection_pb2_grpc.ServerReflectionStub
"""Their types are of clients that block."""


async def code_of(awaitable: Awaitable[object]) -> grpc.StatusCode:
    """The status with which a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code()
