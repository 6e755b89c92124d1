"""MetricsServer: a registry's metrics over HTTP, for Prometheus to scrape."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from engine.network import host_port

logger = logging.getLogger(__name__)


class MetricsServer:
    """Answers every GET with a registry's metrics, from a thread; always as Prometheus' plain text.

    OpenMetrics is never negotiated: its writer renames what has a colon, which the vLLM names have.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. Raises OSError that names the address when it can't be had."""
        app = make_wsgi_app(registry)

        def plain_text(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            environ.pop("HTTP_ACCEPT", None)
            answer: Iterable[bytes] = app(environ, start_response)
            return answer

        try:
            self._server = make_server(host, port, plain_text, _server_class(host), _SilentHandler)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OSError(f"metrics port: cannot listen on {host_port(host, port)}: {reason}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port taken."""
        return self._server.server_port

    def close(self) -> None:
        """Stop listening; takes up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _server_class(host: str) -> type[ThreadingWSGIServer]:
    class Server(ThreadingWSGIServer):
        address_family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]

        def handle_error(self, request: object, client_address: object) -> None:
            logger.debug("a scrape by %s failed", client_address, exc_info=True)

    return Server


class _SilentHandler(WSGIRequestHandler):
    timeout = 10.0  # a client that connects and says nothing gives its thread back

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape every few seconds is no news."""
