"""Who may call, and as which tenant: bearer tokens from a file, asked for by an interceptor.

A token names its tenant, a request cannot. Tokens are kept and compared as SHA-256 digests and are
never logged, not even malformed ones. Health stays open, so that a probe needs no secret.
"""

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health

from engine.errors import ConfigError
from rpc.errors import Unauthenticated, abort

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Whose call is being served; "" without API keys."""

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""The address that the call comes from."""


def note_peer(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Set CLIENT; grpc writes `ipv4:127.0.0.1:5000`."""
    CLIENT.set(context.peer().partition(":")[2].rpartition(":")[0])


_OPEN = f"/{health.SERVICE_NAME}/"
_TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ApiKeys:
    """The tokens of a file: one `token tenant` per line, `#` begins a comment. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tenants: dict[bytes, str] = {}
        self.reload()

    def reload(self) -> None:
        """Read the file again. Raises ConfigError that says which line, and keeps the tokens as they were."""
        try:
            text = self._path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file: {self._path} cannot be read: {error}") from None
        tenants: dict[bytes, str] = {}
        for line, token, tenant in self._entries(text):
            if _digest(token) in tenants:
                raise ConfigError(f"api_key_file: {self._path}, line {line}: the token is there already")
            tenants[_digest(token)] = tenant
        if not tenants:
            raise ConfigError(f"api_key_file: {self._path} holds no token")
        self._tenants = tenants

    def _entries(self, text: str) -> Iterator[tuple[int, str, str]]:
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) != 2 or not _TENANT_NAME.fullmatch(words[1]):
                wanted = "`token tenant`, the tenant 1 to 64 of A-Z a-z 0-9 . _ -"
                raise ConfigError(f"api_key_file: {self._path}, line {number}: expected {wanted}")
            yield number, words[0], words[1]

    def authenticate(self, authorization: str | None) -> str:
        """The tenant behind a header `Bearer TOKEN`. Raises Unauthenticated."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("a bearer token is required: `authorization: Bearer TOKEN`")
        tenant = self.tenant_of(token.strip())
        if tenant is None:
            raise Unauthenticated("the bearer token is not known")
        return tenant

    def tenant_of(self, token: str) -> str | None:
        """The tenant that `token` names; every known token is compared, in constant time."""
        given, found = _digest(token), None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, given):
                found = tenant
        return found


class Authentication(grpc.aio.ServerInterceptor):
    """Lets a call through when it brings a known token, with TENANT set; all but health."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Called by grpc in the task that then runs the handler."""
        if handler_call_details.method.startswith(_OPEN):
            return await continuation(handler_call_details)
        try:
            TENANT.set(self._keys.authenticate(_authorization(handler_call_details.invocation_metadata)))
        except Unauthenticated as error:
            return _refusal(error)
        return await continuation(handler_call_details)


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()


def _authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    return next((v for name, v in metadata if name == "authorization" and isinstance(v, str)), None)


def _refusal(error: Unauthenticated) -> "Handler":
    """A handler that reads nothing and so ends a call of any kind."""

    async def refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
