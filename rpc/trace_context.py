"""Trace context of incoming calls: the W3C headers `traceparent` and `tracestate`, from gRPC metadata and HTTP headers.

Put before the handlers only when requests are traced. Read next: `engine/observe/spans.py`.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc

from engine.observe.spans import TRACE_HEADERS

HEADERS = ("traceparent", "tracestate")

AsgiApp: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]


class TraceContext(grpc.aio.ServerInterceptor):
    """Notes the trace of a gRPC call for the requests that it submits."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Called by grpc in the task that then runs the handler."""
        _note(handler_call_details.invocation_metadata)
        return await continuation(handler_call_details)


class HttpTraceContext:
    """The same for an HTTP call, as ASGI middleware."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one call, in a task of its own."""
        _note((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope.get("headers", ()))
        await self._app(scope, receive, send)


def _note(headers: Iterable[tuple[str, str | bytes]]) -> None:
    TRACE_HEADERS.set({name: value for name, value in headers if name in HEADERS and isinstance(value, str)})
