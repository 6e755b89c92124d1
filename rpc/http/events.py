"""EventStream: an answer as server-sent events, one JSON document each, `[DONE]` at the end.

While there is nothing to say, a comment every 15 s keeps proxies from cutting the connection; they do after 60 s of
silence. An error in mid stream is the last event, in place of `[DONE]`. A reader that is slow holds up `write`,
and what the engine makes meanwhile merges in the request's channel, bounded by its own max_tokens.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from starlette.types import Receive, Scope, Send

from rpc.http.errors import error_body
from rpc.http.large_json import encode, is_large

Write: TypeAlias = Callable[..., Awaitable[None]]
"""Sends the given events at once."""

KEEP_ALIVE_SECONDS = 15.0

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect tokens until its buffer is full
]


class EventStream:
    """An ASGI app that runs `produce` once; it is given what writes events."""

    def __init__(
        self,
        produce: Callable[[Write], Awaitable[None]],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._produce = produce
        self._sleep = sleep
        self._num_writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream."""

        async def write(*events: Any) -> None:
            if events:
                self._num_writes += 1
                body = b"".join([await _encoded(event) for event in events])
                await send({"type": "http.response.body", "body": body, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        last = b"data: [DONE]\n\n"
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            await self._produce(write)
        except Exception as error:
            last = _encode(error_body(error)[1])
        finally:
            keep_alive.cancel()
        await send({"type": "http.response.body", "body": last})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            before = self._num_writes
            await self._sleep(KEEP_ALIVE_SECONDS)
            if self._num_writes == before:
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})


async def _encoded(event: dict[str, Any]) -> bytes:
    return b"data: " + await encode(event) + b"\n\n" if is_large(event) else _encode(event)


def _encode(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
