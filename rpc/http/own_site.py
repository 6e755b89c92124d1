"""OwnSite: what browsers send on behalf of other sites is refused, where nothing else says who may call.

Without API keys a server on loopback is open to every page that its user visits: one may post to it as text/plain,
which needs no leave, or point a name of its own at 127.0.0.1 (DNS rebinding) and read the answers, too.
"""

import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rpc.http.errors import body
from rpc.options import ServerOptions

ANY = "*"
_LOOPBACK = re.compile(r"127(\.[0-9]{1,3}){3}")


class OwnSite:
    """An ASGI middleware.

    Args:
        hosts: names by which this server may be called beside those of loopback; None for any.
        origins: of other sites whose pages may call.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, or answer 403."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own(host):
            reason = f"host {host[:100]!r} is not allowed; --allowed-hosts names those that are"
        elif origin is not None and not self._may_call(origin, host):
            reason = f"origin {origin[:100]!r} is not allowed; --allowed-origins names those that are"
        else:
            await self._app(scope, receive, send)
            return
        answer = JSONResponse(body(reason, "invalid_request_error"), 403, {"connection": "close"})
        await answer(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        return self._hosts is None or is_loopback(name.lower()) or name.lower() in self._hosts

    def _may_call(self, origin: str, host: str) -> bool:
        return ANY in self._origins or origin in self._origins or origin.partition("://")[2] == host


def is_loopback(name: str) -> bool:
    """Whether a host's name can only mean this machine."""
    return name in ("localhost", "::1", "[::1]") or _LOOPBACK.fullmatch(name) is not None or name.endswith(".localhost")


def allowed_hosts(options: ServerOptions) -> Collection[str] | None:
    """Names beside loopback's by which the server may be called; None for any: its address is not loopback's."""
    if options.allowed_hosts is None:
        return () if is_loopback(options.host) else None
    names = listed(options.allowed_hosts)
    return None if ANY in names else {name.lower() for name in names}


def listed(setting: str | None) -> list[str]:
    """The items of a setting that has them separated by commas."""
    return [item.strip() for item in (setting or "").split(",") if item.strip()]
