"""EventStream by itself, in the time that the test gives it."""

import asyncio
from typing import Any

from rpc.http.events import EventStream, Write


async def test_a_comment_every_fifteen_seconds_of_silence() -> None:
    sleeping: asyncio.Queue[float] = asyncio.Queue()
    waking: asyncio.Queue[None] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    go_on = asyncio.Event()

    async def sleep(seconds: float) -> None:
        sleeping.put_nowait(seconds)
        await waking.get()

    async def produce(write: Write) -> None:
        await go_on.wait()
        await write({"a": 1})
        go_on.clear()
        await go_on.wait()

    async def nothing() -> Any:
        raise AssertionError

    stream = asyncio.create_task(EventStream(produce, sleep)({}, nothing, sent.put))
    assert (await sent.get())["type"] == "http.response.start"
    for _ in range(2):
        assert await sleeping.get() == 15
        waking.put_nowait(None)
        assert (await sent.get())["body"] == b": keep-alive\n\n"
    assert await sleeping.get() == 15
    go_on.set()
    assert (await sent.get())["body"] == b'data: {"a":1}\n\n'
    waking.put_nowait(None)
    assert await sleeping.get() == 15  # it was not silent
    assert sent.empty()
    go_on.set()
    await stream
    assert await sent.get() == {"type": "http.response.body", "body": b"data: [DONE]\n\n"}
    assert sent.empty()
