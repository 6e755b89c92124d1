"""Server: one engine behind grpc.aio, from the bound port to the last status.

Lifetime: bind -> NOT_SERVING while the engine loads -> SERVING -> a signal -> NOT_SERVING, new calls
answer UNAVAILABLE, live streams get the grace time -> the rest ends with a status -> stopped.
The port stays open while draining, so that a health check sees NOT_SERVING rather than a refused
connection. Read next: `rpc/servicer.py`; `docs/rpc.md` has the contract.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.engine import Engine
from rpc.options import ServerOptions
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.proto.engine.v1 import engine_pb2_grpc as pb_grpc
from rpc.servicer import EngineServicer

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Engine"].full_name

FLUSH_SECONDS = 1.0
"""Time for last statuses to leave. Only health watchers, which never end by themselves, use all of it."""


class Server:
    """Serves one engine. `await start()`, then `await run()`; `stop()` is what a signal calls."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._servicer = EngineServicer(engine)
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=options.channel_arguments())
        self._stop_asked = asyncio.Event()
        self._scope: asyncio.Timeout | None = None

    async def start(self) -> int:
        """Listen, not serving yet. Returns the port. Raises OSError when it cannot be bound."""
        pb_grpc.add_EngineServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        port = _bind(self._server, self._options)
        await self._server.start()
        return port

    async def run(self) -> None:
        """Load the engine, serve until a signal, drain. Raises what the engine fails with."""
        scope = self._scope = asyncio.timeout(None)
        with self._signals():
            try:
                async with scope, self._engine:
                    await self._serve()
            except TimeoutError:
                if not scope.expired():
                    raise
                logger.warning("stopped at once")
            finally:
                self._scope = None
                await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
                await self._server.stop(0 if scope.expired() else FLUSH_SECONDS)

    def stop(self) -> None:
        """Drain; at once the second time, and while there is nothing to drain yet."""
        at_once = self._stop_asked.is_set() or self._engine.state == "starting"
        self._stop_asked.set()
        if at_once and self._scope is not None and self._scope.when() is None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def _serve(self) -> None:
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        logger.info("serving")
        async with asyncio.TaskGroup() as group:
            failed = group.create_task(self._engine.wait_failed())
            asked = group.create_task(self._stop_asked.wait())
            await asyncio.wait((failed, asked), return_when=asyncio.FIRST_COMPLETED)
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            if not failed.done():
                await self._drain()
            asked.cancel()
            failed.cancel()
        if failed.done() and not failed.cancelled():
            raise failed.result()

    async def _drain(self) -> None:
        grace = self._options.grace
        logger.info("draining, at most %g s", grace)
        # The engine may finish a stream before a slow client has read it: one limit covers both.
        with suppress(TimeoutError):
            async with asyncio.timeout(grace + FLUSH_SECONDS):
                await self._engine.drain(grace)
                await self._servicer.wait_idle()

    async def _set_health(self, status: int) -> None:
        for service in (health.OVERALL_HEALTH, SERVICE_NAME):
            await self._health.set(service, status)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _bind(server: grpc.aio.Server, options: ServerOptions) -> int:
    """Bind `options.host`:`options.port`; raises OSError that names the address."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{host}:{options.port}"
    try:
        # grpc says only that binding failed, after log lines of its own; a plain socket says why.
        family, kind, _, _, where = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
        return server.add_insecure_port(address)
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {(error.strerror or str(error)).lower()}") from error
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
