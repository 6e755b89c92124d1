"""The HTTP interface as one ASGI app: which path is whose, and who may call it.

Read next: `rpc/http/endpoint.py`, then the handlers.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from rpc.http import facts, static, text
from rpc.http.chat import chat_completions
from rpc.http.completions import completions
from rpc.http.endpoint import Endpoint
from rpc.http.errors import body
from rpc.http.fields import Fields
from rpc.http.metrics import HttpMetrics
from rpc.http.own_site import OwnSite, allowed_hosts, listed
from rpc.http.service import Service
from rpc.http.state import LiveState
from rpc.trace_context import HttpTraceContext

_Routes: TypeAlias = tuple[tuple[str, str, Callable[[Service, Fields], Awaitable[ASGIApp]]], ...]
"""Method, path, handler."""

_ROUTES: _Routes = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("GET", "/v1/models", facts.models),
    ("GET", "/v1/models/{model:path}", facts.model),
    ("POST", "/tokenize", text.tokenize),
    ("POST", "/detokenize", text.detokenize),
    ("GET", "/tokenizer_info", text.tokenizer_info),
)
_OPEN_ROUTES: _Routes = (
    ("GET", "/version", facts.version),
    ("GET", "/health", facts.health),
    ("GET", "/ready", facts.ready),
    ("GET", "/metrics", facts.metrics),
    *static.ROUTES,
)


def make_app(service: Service) -> Starlette:
    """The app over `service`."""
    open_routes: _Routes = (*_OPEN_ROUTES, ("GET", "/state", LiveState(service.clock)))
    metrics = HttpMetrics(service.clock)
    service.engine.metrics.register(metrics)
    routes: list[Route] = []
    for table, keys, is_counted in ((_ROUTES, service.keys, True), (open_routes, None, False)):
        for method, path, handler in table:
            endpoint: ASGIApp = Endpoint(
                partial(handler, service), keys=keys, pace=service.calls.pace, options=service.options
            )
            if is_counted:
                endpoint = metrics.counted(method, path, endpoint)
            routes.append(Route(path, endpoint, methods=[method]))
    return Starlette(
        routes=routes,
        middleware=_middleware(service),
        exception_handlers={HTTPException: _no_such_thing},
    )


def _middleware(service: Service) -> list[Middleware]:
    options, chain = service.options, []
    origins = listed(options.allowed_origins)
    if service.engine.is_traced:
        chain.append(Middleware(HttpTraceContext))
    if service.keys is None or options.allowed_hosts is not None:
        chain.append(Middleware(OwnSite, hosts=allowed_hosts(options), origins=origins))
    if origins:
        exposed = ["x-request-id", "retry-after"]
        chain.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=exposed,
            )
        )
    return chain


async def _no_such_thing(request: Request, error: Exception) -> JSONResponse:
    """A path or method that does not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return JSONResponse(body(message, "invalid_request_error"), error.status_code, error.headers)
