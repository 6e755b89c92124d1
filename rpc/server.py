"""Server: one engine behind grpc.aio and, with an `http_port`, HTTP; from the bound ports to the last status.

Lifetime: bind -> NOT_SERVING while the engine loads -> SERVING -> a signal -> NOT_SERVING, new calls
answer UNAVAILABLE, live streams get the grace time -> the rest ends with a status -> stopped.
The ports stay open while draining, so that a health check sees NOT_SERVING rather than a refused
connection. Health is also NOT_SERVING while the watchdog finds that the engine stands still.
Read next: `rpc/servicer.py`; `docs/rpc.md` has the contract.
"""

import asyncio
import logging
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.engine import Engine
from engine.errors import ConfigError
from engine.network import host_port
from rpc import router
from rpc.auth import Authentication
from rpc.bad_messages import BadMessages
from rpc.calls import Calls
from rpc.clock import Clock, MonotonicClock
from rpc.credentials import read_credentials
from rpc.grpc_metrics import GrpcMetrics
from rpc.options import DEFAULT_HTTP_PORT, ServerOptions
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.proto.engine.v1 import engine_pb2_grpc as pb_grpc
from rpc.servicer import EngineServicer
from rpc.trace_context import TraceContext
from rpc.watchdog import Watchdog

if TYPE_CHECKING:
    from rpc.http.server import HttpServer
    from rpc.router.servicer import RouterServicer

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Engine"].full_name

FLUSH_SECONDS = 1.0
"""Time for last statuses to leave. Only health watchers, which never end by themselves, use all of it."""


class Server:
    """Serves one engine. `await start()`, then `await run()`; `stop()` is what a signal calls.

    Raises ConfigError when the API keys or the TLS files cannot be used, or an extra is missing.

    Attributes:
        http_port: the port taken for HTTP, None without one.
    """

    def __init__(self, engine: Engine, options: ServerOptions, clock: Clock | None = None) -> None:
        clock = clock or MonotonicClock()
        self._engine = engine
        self._options = options
        self._keys, self._credentials = read_credentials(options)
        self._calls = Calls(clock)
        self._servicer = EngineServicer(engine, self._calls, clock)
        self._router = _router_servicer(engine, self._calls, clock)
        self._watchdog = Watchdog(engine, options.watchdog_seconds, clock)
        self._health = health.aio.HealthServicer()
        self._is_serving = False
        self._http = self._http_server(clock)
        self._port = 0
        self.http_port: int | None = None
        self._server = grpc.aio.server(interceptors=self._interceptors(), options=options.channel_arguments())
        self._signals = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop}
        if self._keys is not None:
            self._signals[signal.SIGHUP] = self.reload_keys
        self._stop_asked = asyncio.Event()
        self._scope: asyncio.Timeout | None = None

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        metrics = GrpcMetrics()
        self._engine.metrics.register(metrics)
        interceptors: list[grpc.aio.ServerInterceptor] = [metrics]
        if self._keys is not None:
            interceptors.append(Authentication(self._keys))
        if self._engine.is_traced:
            interceptors.append(TraceContext())
        return [*interceptors, BadMessages()]

    def _http_server(self, clock: Clock) -> "HttpServer | None":
        if self._options.http_port is None:
            return None
        try:
            from rpc.http.server import HttpServer
            from rpc.http.service import Service
        except ModuleNotFoundError as error:
            if self._options.http_port == DEFAULT_HTTP_PORT:  # nobody has asked for it
                logger.warning("HTTP is off: it needs the extra http, pip install 'engine-llm[http]'")
                return None
            raise ConfigError(f"http_port: needs the extra http, pip install 'engine-llm[http]' ({error})") from error
        service = Service(
            self._engine,
            self._options,
            self._calls,
            keys=self._keys,
            is_serving=lambda: self._is_serving,
            clock=clock,
        )
        return HttpServer(service, flush_seconds=FLUSH_SECONDS)

    async def start(self) -> int:
        """Listen, not serving yet, and handle signals until `run` ends.

        Returns the gRPC port. Raises OSError when a port cannot be bound.
        """
        pb_grpc.add_EngineServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME]
        if self._router is not None:
            names.append(self._router.register(self._server))
        reflection.enable_server_reflection(names, self._server)
        await self._set_serving(False)
        port = self._port = _bind(self._server, self._options, self._credentials)
        if self._http is not None:
            self.http_port = self._http.start()
        await self._server.start()
        for number, handler in self._signals.items():
            asyncio.get_running_loop().add_signal_handler(number, handler)
        return port

    async def run(self) -> None:
        """Load the engine, serve until a signal, drain. Raises what the engine fails with."""
        scope = self._scope = asyncio.timeout(0 if self._stop_asked.is_set() else None)
        try:
            async with scope, self._engine:
                await self._serve()
        except TimeoutError:
            if not scope.expired():
                raise
            logger.warning("stopped at once")
        finally:
            self._scope = None
            await self._set_serving(False)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._server.stop(0 if scope.expired() else FLUSH_SECONDS))
                if self._http is not None:
                    group.create_task(self._http.stop(at_once=scope.expired()))
            for number in self._signals:
                asyncio.get_running_loop().remove_signal_handler(number)

    def stop(self) -> None:
        """Drain; at once the second time, and while there is nothing to drain yet."""
        at_once = self._stop_asked.is_set() or self._engine.state == "starting"
        self._stop_asked.set()
        if at_once and self._scope is not None and self._scope.when() is None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def reload_keys(self) -> None:
        """Read the API keys again; if they cannot be read the old ones stay. Live calls go on."""
        assert self._keys is not None
        try:
            self._keys.reload()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("read the API keys again")

    async def _serve(self) -> None:
        await self._set_serving(True)
        logger.info("serving %s", self._what_and_where())
        async with asyncio.TaskGroup() as group:
            failed = group.create_task(self._engine.wait_failed())
            asked = group.create_task(self._stop_asked.wait())
            watching = group.create_task(self._watchdog.watch(self._set_serving))
            await asyncio.wait((failed, asked), return_when=asyncio.FIRST_COMPLETED)
            watching.cancel()
            await self._set_serving(False)
            if not failed.done():
                await self._drain()
            asked.cancel()
            failed.cancel()
        if self._engine.state == "failed":
            raise await self._engine.wait_failed()

    def _what_and_where(self) -> str:
        """The model, and every address that is asked for it."""
        info, options = self._engine.info, self._options
        where = [f"gRPC {host_port(options.host, self._port)}"]
        if self.http_port is not None:
            scheme = "http" if options.ssl_certfile is None else "https"
            where.append(f"OpenAI API and page {scheme}://{host_port(options.host, self.http_port)}/")
        return f"{info.served_model_name} in {info.dtype} on {info.device}: {', '.join(where)}"

    async def _drain(self) -> None:
        grace = self._options.grace
        logger.info("draining, at most %g s; another signal (Ctrl-C) stops at once", grace)
        # The engine may finish a stream before a slow client has read it: one limit covers both.
        with suppress(TimeoutError):
            async with asyncio.timeout(grace + FLUSH_SECONDS):
                await self._engine.drain(grace)
                await self._calls.wait_idle()

    async def _set_serving(self, is_serving: bool) -> None:
        self._is_serving = is_serving
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if is_serving else statuses.NOT_SERVING
        for service in (health.OVERALL_HEALTH, SERVICE_NAME):
            await self._health.set(service, status)
        if self._router is not None:
            self._router.set_serving(is_serving)


def _bind(server: grpc.aio.Server, options: ServerOptions, credentials: grpc.ServerCredentials | None) -> int:
    """Bind `options.host`:`options.port`; raises OSError that names the address."""
    address = host_port(options.host, options.port)
    try:
        # grpc says only that binding failed, after log lines of its own; a plain socket says why.
        family, kind, _, _, where = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {(error.strerror or str(error)).lower()}") from error
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


def _router_servicer(engine: Engine, calls: Calls, clock: Clock) -> "RouterServicer | None":
    """None without the extra `router`."""
    if not router.is_installed():
        return None
    from rpc.router.servicer import RouterServicer

    return RouterServicer(engine, calls, clock)
