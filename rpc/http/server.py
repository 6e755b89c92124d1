"""HttpServer: the app behind uvicorn, in the loop that is running; signals and lifetime are `rpc/server.py`'s.

While it drains the port stays open, so that a probe of /ready sees 503 rather than a refused connection.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator

import h11
import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.network import host_port
from rpc.http.app import make_app
from rpc.http.errors import body
from rpc.http.service import Service
from rpc.options import ServerOptions

KEEP_ALIVE_SECONDS = 75
"""Above the 60 s that load balancers keep an idle connection: the side that ends it first should be the client."""

BACKLOG = 2048

_BODY_LENGTH = re.compile(rb"^(?:content-length|transfer-encoding)[ \t]*:", re.IGNORECASE | re.MULTILINE)

GIVE_UP_SECONDS = 5
"""For calls that outlive their connections; there are none unless something is wrong."""


class HttpServer:
    """Serves the engine of `service`. `start()`, then `await stop()`."""

    def __init__(self, service: Service, *, flush_seconds: float) -> None:
        """`flush_seconds` is the time that last bytes have to leave."""
        self._options = options = service.options
        config = uvicorn.Config(
            make_app(service),
            http=_Connection,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=options.ssl_cert_reqs,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GIVE_UP_SECONDS,
            backlog=BACKLOG,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        config.load()
        self._server = _Uvicorn(config, flush_seconds)
        self._task: asyncio.Task[None]

    def start(self) -> int:
        """Listen; returns the port. Raises OSError that names the address when it cannot be had."""
        listener = _listener(self._options)
        self._task = asyncio.create_task(self._server.serve([listener]), name="http-server")
        port: int = listener.getsockname()[1]
        return port

    async def stop(self, *, at_once: bool = False) -> None:
        """Close the port; connections have the flush time to end, or none."""
        self._server.should_exit = True
        if at_once:
            self._server.flush_seconds = 0
        self._server.exit_asked.set()
        await self._task


class _Connection(H11Protocol):
    """Is closed when the head of its next request is not there, to its end, within the keep-alive time.

    uvicorn sets that timer after an answer only and stops it at the next byte: half a head would hold a socket.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def handle_events(self) -> None:
        """Refuse a request that says twice where its body ends, which h11 would settle by itself.

        What stands before this server may settle it otherwise, and see other requests (RFC 9112, 6.3).
        """
        if self.conn.their_state is h11.IDLE:
            head = self.conn.trailing_data[0].partition(b"\r\n\r\n")[0]
            if len(_BODY_LENGTH.findall(head)) > 1:
                self.send_400_response("Content-Length and Transfer-Encoding: one of them, once")
                return
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """The parser's refusals have the form of all others."""
        content = JSONResponse(body(msg, "invalid_request_error"), 400, {"connection": "close"})
        head = h11.Response(status_code=400, headers=content.raw_headers, reason=b"Bad Request")
        for event in (head, h11.Data(data=bytes(content.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Go on waiting if this is not the end of a head."""
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if timer is not None:
            if self.cycle is None or self.cycle.response_complete:
                self.timeout_keep_alive_task = timer
            else:
                timer.cancel()


class _Uvicorn(uvicorn.Server):
    """Takes no signals, sleeps where uvicorn's own looks ten times a second whether to exit, and hangs up at the end.

    uvicorn itself would cancel the calls that are left, and log a traceback of each.
    """

    def __init__(self, config: uvicorn.Config, flush_seconds: float) -> None:
        super().__init__(config)
        self.flush_seconds = flush_seconds
        self.exit_asked = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield

    async def main_loop(self) -> None:
        """Renew the Date header every second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self.exit_asked.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port; to a call that has not ended after the flush time its client has left."""
        hang_up = asyncio.get_running_loop().call_later(self.flush_seconds, self._hang_up)
        await super().shutdown(sockets)
        hang_up.cancel()

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _listener(options: ServerOptions) -> socket.socket:
    host, port = options.host, options.http_port or 0
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"http port: cannot listen on {host_port(host, port)}: {reason}") from error
    _give_up_on_the_dead(listener, options)
    return listener


def _give_up_on_the_dead(listener: socket.socket, options: ServerOptions) -> None:
    """What accepted connections inherit: a client that is gone, or reads nothing at all, is noticed as gRPC's is."""
    idle, interval = max(1, round(options.keepalive_time)), max(1, round(options.keepalive_timeout))
    patience = round(1000 * (options.keepalive_time + options.keepalive_timeout))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)
        # Keepalive is silent while bytes wait to be taken.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
