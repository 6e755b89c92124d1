"""Reading answers of OpenAI-compatible servers, written out byte by byte."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from aiohttp import web

from engine.cli.bench.load import Answer, BackendError
from engine.cli.bench.openai import OpenAIBackend

USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}}\n\n'
DONE = b"data: [DONE]\n\n"


def text(value: str) -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%s","finish_reason":null}]}\n\n' % value.encode()


def delta(value: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":%s,"finish_reason":null}]}\n\n' % value.encode()


@asynccontextmanager
async def speaking(pieces: Sequence[bytes], *, chat: bool = False, status: int = 200) -> AsyncIterator[OpenAIBackend]:
    """A client of a server whose answers are `pieces`, each sent by itself."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions" if chat else "/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/"
        async with OpenAIBackend(url, chat=chat, model="m", sampling={}, api_key=None, ssl=None) as backend:
            yield backend
    finally:
        await runner.cleanup()


async def read(pieces: Sequence[bytes], **options: Any) -> Answer:
    """The answer, by a clock that counts its readings."""
    ticks = count()
    answer = Answer(lambda: float(next(ticks)), 0.0, 3)
    async with speaking(pieces, **options) as backend:
        await backend.send(b"{}", answer)
    return answer


async def test_events_count_and_the_usage_says_how_many_tokens() -> None:
    answer = await read([text("a"), text("bc"), USAGE, DONE])
    assert (answer.times, answer.output_tokens, answer.prompt_tokens) == ([0.0, 1.0], 5, 11)


async def test_events_may_come_in_any_pieces() -> None:
    whole = b": a comment\n\n" + text("a") + text("b") + USAGE + DONE
    for pieces in ([whole], [whole[:20], whole[20:90], whole[90:]], [bytes([b]) for b in whole]):
        answer = await read(pieces)
        assert (len(answer.times), answer.output_tokens) == (2, 5)


async def test_without_usage_messages_stand_for_tokens() -> None:
    answer = await read([text("a"), text("b"), text("c"), DONE])
    assert (answer.output_tokens, answer.prompt_tokens) == (3, 3)


async def test_a_chats_role_and_its_empty_end_are_no_tokens() -> None:
    pieces = ['{"role":"assistant","content":""}', '{"content":"a"}', '{"tool_calls":[{"index":0}]}', "{}"]
    answer = await read([*map(delta, pieces), DONE], chat=True)
    assert (answer.times, answer.output_tokens) == ([0.0, 1.0], 2)


@pytest.mark.parametrize(
    ("pieces", "status", "says"),
    [
        ([text("a"), b'data: {"error": {"message": "out of memory"}}\n\n'], 200, "out of memory"),
        ([b'{"error": {"message": "no such model"}}'], 404, "404: no such model"),
        ([b"<html>\n  bad gateway</html>"], 502, "502: <html> bad gateway</html>"),
        ([], 503, "503: no reason given"),
    ],
)
async def test_errors_are_one_line(pieces: list[bytes], status: int, says: str) -> None:
    with pytest.raises(BackendError) as raised:
        await read(pieces, status=status)
    assert str(raised.value) == says
