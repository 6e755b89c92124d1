"""JSON of answers with thousands of log-probabilities, made without holding up the event loop.

A thread alone would not do: the encoder keeps the GIL for as long as one call of it lasts, 0.5 s for 4,000 tokens of 20
alternatives. So it is called for slices, 1 ms each, between which other threads have their turn.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from starlette.responses import JSONResponse, Response

LARGE = 256
"""Positions above which a thread is worth its start; so many take 10 ms."""
SLICE = 32


async def json_response(content: dict[str, Any]) -> Response:
    """The answer with that body."""
    if not is_large(content):
        return JSONResponse(content)
    return Response(await encode(content), media_type="application/json")


async def encode(content: dict[str, Any]) -> bytes:
    """A large object as compact JSON."""
    return (await asyncio.to_thread(lambda: "".join(_sliced(content)))).encode()


def is_large(content: dict[str, Any]) -> bool:
    """Whether a choice of it has many positions, in either of OpenAI's forms."""
    found = (choice.get("logprobs") or {} for choice in content.get("choices", ()))
    return any(len(logprobs.get("content") or logprobs.get("tokens") or ()) > LARGE for logprobs in found)


def _sliced(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        opening = "{"
        for key, item in value.items():
            yield f"{opening}{json.dumps(key)}:"
            yield from _sliced(item)
            opening = ","
        yield "}" if value else "{}"
    elif isinstance(value, list) and value:
        opening = "["
        for start in range(0, len(value), SLICE):
            part = value[start : start + SLICE]
            yield opening
            if len(value) > SLICE:
                yield json.dumps(part, separators=(",", ":"), ensure_ascii=False)[1:-1]
            else:
                yield from (piece for i, item in enumerate(part) for piece in _after_comma(i, item))
            opening = ","
        yield "]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def _after_comma(i: int, item: Any) -> Iterator[str]:
    if i:
        yield ","
    yield from _sliced(item)
