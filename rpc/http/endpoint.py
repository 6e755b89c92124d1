"""Endpoint: one path of the HTTP interface, from the request's headers to the last byte of its answer.

Invariants: a client that leaves has its handler cancelled, which closes the handler's output streams and so
aborts its requests; every error leaves in OpenAI's form; a call runs as the tenant that its key names.
Read next: `rpc/http/app.py` lists the endpoints.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeAlias

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rpc.auth import CLIENT, TENANT, ApiKeys
from rpc.http.errors import TooLarge, TooSlow, error_response
from rpc.http.fields import Fields
from rpc.options import ServerOptions
from rpc.pace import Pace

Handler: TypeAlias = Callable[[Fields], Awaitable[ASGIApp]]
"""Takes the body, or what a GET has in its path; gives the answer, a Starlette response for one."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id")
"""The X-Request-Id of the call that is being served."""

_REQUEST_ID = re.compile(r"[!-~]{1,256}")

logger = logging.getLogger(__name__)

MAX_TOLD = 100
"""Names of unknown fields that are told of: what callers invent must not fill the log."""

MIN_BYTES_PER_SECOND = 500
"""Of a body, as Apache's mod_reqtimeout has it: one that comes in drops must not hold its socket for ever."""


MAX_DROPPED_BYTES = 64 << 20
"""Of a body above the limit, which are read for its sender to see the answer."""


class Endpoint:
    """An ASGI app. Without `keys` anybody may call."""

    def __init__(self, handler: Handler, *, keys: ApiKeys | None, pace: Pace, options: ServerOptions) -> None:
        self._handler = handler
        self._keys = keys
        self._pace = pace
        self._told: set[str] = set()
        self._max_body_bytes = options.max_message_bytes
        self._patience = options.keepalive_time + options.keepalive_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        headers = Headers(scope=scope)
        REQUEST_ID.set(_request_id(headers))
        CLIENT.set((scope.get("client") or ("",))[0])
        send = _with_request_id(send, REQUEST_ID.get())
        try:
            if self._keys is not None:
                TENANT.set(self._keys.authenticate(headers.get("authorization")))
            _check_length(headers.getlist("content-length"), self._max_body_bytes)
            body = await _read_body(receive, self._max_body_bytes, self._patience)
        except _ClientGone:
            return
        except Exception as error:
            refusal = error_response(error, self._pace)
            refusal.headers["connection"] = "close"  # else it waits for a body that may never come
            await refusal(scope, receive, send)
            return
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(self._answer(body, scope, receive, send))
            watching = group.create_task(_client_leaves(receive))
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            answering.cancel()
            watching.cancel()

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            fields = Fields.parse(body) if scope["method"] == "POST" else Fields(scope["path_params"])
            answer = await self._handler(fields)
            self._tell_of_unread(scope["path"], fields)
        except Exception as error:
            answer = error_response(error, self._pace)
        await answer(scope, receive, send)

    def _tell_of_unread(self, path: str, fields: Fields) -> None:
        """Warn, once for each name, of fields that have no effect."""
        if len(self._told) < MAX_TOLD and (names := fields.unread() - self._told):
            self._told |= names
            shown = ", ".join(repr(name[:40]) for name in sorted(names)[:10])
            logger.warning("%s: fields that are not known, or have no effect with the others: %s", path, shown)


class _ClientGone(Exception):
    """The client left before it had sent its request."""


def _request_id(headers: Headers) -> str:
    """The caller's, if it is one that a header can carry back, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _with_request_id(send: Send, request_id: str) -> Send:
    header = (b"x-request-id", request_id.encode())

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return send_with_id


def _check_length(lengths: list[str], limit: int) -> None:
    """Raises TooLarge at once for a length that is not worth waiting for."""
    if lengths and int(lengths[0]) > limit + MAX_DROPPED_BYTES:
        raise TooLarge(f"the body is longer than max_message_bytes, {limit}")


async def _read_body(receive: Receive, limit: int, patience: float) -> bytes:
    """Raises _ClientGone, TooSlow and TooLarge.

    `patience` is in seconds, for each piece and for being behind the least rate: keepalive sees that a client is
    there, not that it sends. What is too long is read on for as long, and dropped: a client that still sends when its
    connection is closed never sees the answer.
    """
    body, length, now = bytearray(), 0, asyncio.get_running_loop().time
    began = now()
    try:
        async with asyncio.timeout(patience) as scope:
            more_body = True
            while more_body:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientGone
                piece, more_body = message.get("body", b""), message.get("more_body", False)
                length += len(piece)
                if length <= limit:
                    body += piece
                    scope.reschedule(min(now(), began + length / MIN_BYTES_PER_SECOND) + patience)
    except TimeoutError:
        if length <= limit:
            slow = f"came more slowly than {MIN_BYTES_PER_SECOND} bytes/s"
            raise TooSlow(f"the body stopped, or {slow}, for {patience:g} s") from None
    if length > limit:
        raise TooLarge(f"the body is longer than max_message_bytes, {limit}")
    return bytes(body)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
