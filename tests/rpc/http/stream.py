"""Reading server-sent events, independently of how they are written."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    """Each event's document, "[DONE]" as it is; every event is one `data:` line and a blank one."""
    lines = [line async for line in response.aiter_lines()]
    assert lines[1::2] == [""] * (len(lines) // 2) and len(lines) % 2 == 0
    for line in lines[::2]:
        assert line.startswith("data: ")
        text = line.removeprefix("data: ")
        yield text if text == "[DONE]" else json.loads(text)


async def all_events(response: httpx.Response) -> list[Any]:
    return [event async for event in events(response)]
