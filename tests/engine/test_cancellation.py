"""Streams that their readers leave, in every state and in every way: the loop gets everything back."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.engine.fake_device import expected
from tests.engine.server import Server, collect, serving, tokens_of


async def is_aborted(server: Server) -> bool:
    """Everything is back, long before the 100 tokens that were asked for."""
    return await server.is_clean() and len(server.device.plans) < 20


async def test_break_aborts_even_when_the_stream_has_a_name() -> None:
    async with serving() as server:
        stream = server.generate([1, 2], 100)
        async for _ in stream:
            break
        assert await is_aborted(server)
        assert stream.request_id


async def test_dropping_aborts() -> None:
    async with serving() as server:
        stream = server.generate([1, 2], 100)
        del stream
        gc.collect()
        assert await is_aborted(server)


async def test_leaving_the_context_aborts() -> None:
    async with serving() as server:
        stream = server.generate([1, 2], 100)
        async with stream:
            pass
        assert await is_aborted(server)


async def test_cancelling_a_read_aborts() -> None:
    async with serving(free_running=False) as server:
        stream = server.generate([1, 2], 100)
        reading = asyncio.create_task(stream.read())
        await server.until(lambda: len(server.device.plans) == 2)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await is_aborted(server)


async def test_an_exception_in_the_reader_aborts() -> None:
    async with serving() as server:
        stream = server.generate([1, 2], 100)
        with pytest.raises(ZeroDivisionError):
            async for _ in stream:
                1 / 0  # noqa: B018
        assert await is_aborted(server)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("prompt_len", [3, 40])
async def test_cancel_in_every_state(steps: int, prompt_len: int) -> None:
    """K16: queued, before anything settled, mid-chunk, while decoding; with another stream alive."""
    async with serving(free_running=False) as server:
        other = asyncio.create_task(tokens_of(server.generate([9, 9], 20)))
        task = asyncio.create_task(tokens_of(server.generate([1] * prompt_len, 60)))
        for step in range(1, steps + 1):
            await server.until(lambda step=step: len(server.device.plans) > step)  # type: ignore[misc]
            server.device.open(step)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await server.is_clean()
        assert len(server.device.plans) < 40
        assert await other == expected([9, 9], 20)


async def test_cancel_while_waiting_for_a_row() -> None:
    async with serving(max_num_seqs=1) as server:
        running = asyncio.create_task(tokens_of(server.generate([1], 20)))
        queued = server.generate([2], 20)
        queued.cancel()
        queued.cancel()
        assert await running == expected([1], 20)
        (last,) = await collect(queued)
        assert last.finish_reason == "abort" and last.token_ids == ()
        assert await server.is_clean()


async def test_aborting_the_unknown_or_finished_is_harmless() -> None:
    async with serving() as server:
        stream = server.generate([1], 2)
        assert await tokens_of(stream) == expected([1], 2)
        stream.cancel()
        server.inbox.abort("nobody")
        assert await server.is_clean()


async def test_finalizers_may_run_in_another_thread() -> None:
    async with serving(free_running=False) as server:
        streams = [server.generate([1], 100)]
        await server.until(lambda: len(server.device.plans) == 2)
        await asyncio.to_thread(streams.clear)
        assert await is_aborted(server)


async def test_cancelling_a_control_does_not_hurt_the_loop() -> None:
    async with serving(free_running=False) as server:
        stream = server.generate([1], 3)
        await server.until(lambda: len(server.device.plans) == 2)
        waiting: Coroutine[Any, Any, Any] = server.inbox.control(server.roster.audit)
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.device.open(99)
        assert await tokens_of(stream) == expected([1], 3)
