"""EventStream: an answer as server-sent events, one JSON document each, `[DONE]` at the end.

An error in mid stream is the last event, in place of `[DONE]`. A reader that is slow holds up `write`, and what
the engine makes meanwhile merges in the request's channel, bounded by its own max_tokens.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from starlette.types import Receive, Scope, Send

from rpc.http.errors import error_body

Write: TypeAlias = Callable[..., Awaitable[None]]
"""Sends the given events at once."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect tokens until its buffer is full
]


class EventStream:
    """An ASGI app that runs `produce` once; it is given what writes events."""

    def __init__(self, produce: Callable[[Write], Awaitable[None]]) -> None:
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream."""

        async def write(*events: Any) -> None:
            if events:
                body = b"".join(_encode(event) for event in events)
                await send({"type": "http.response.body", "body": body, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        last = b"data: [DONE]\n\n"
        try:
            await self._produce(write)
        except Exception as error:
            last = _encode(error_body(error)[1])
        await send({"type": "http.response.body", "body": last})


def _encode(event: Any) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
