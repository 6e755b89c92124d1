"""OutputChannel: how tokens gather for a reader, against a plain list of what was pushed."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestFault
from engine.request.outputs import Delta
from engine.serving.stream import MERGE_TOKENS, OutputChannel, OutputStream


def token(i: int, index: int = 0, **more: Any) -> Delta:
    return Delta(index=index, text=f"{i},", token_ids=(i,), **more)


def push(channel: OutputChannel, i: int, index: int, bare: bool) -> None:
    if bare:
        channel.plain_sink(index, lambda i: f"{i},")(i)
    else:
        channel.push(token(i, index))


async def test_bare_tokens_carry_what_the_first_delta_said() -> None:
    channel = OutputChannel(1)
    channel.push(token(0, num_cached_tokens=7))
    assert await channel.get() == token(0, num_cached_tokens=7)
    push_plain = channel.plain_sink(0, lambda i: f"{i},")
    for i in (1, 2):
        push_plain(i)
    channel.push(token(3, num_cached_tokens=7, finish_reason="length"))
    merged = Delta(0, "1,2,3,", (1, 2, 3), finish_reason="length", num_cached_tokens=7)
    assert await channel.get() == merged
    assert await channel.get() is None


async def ready(channel: OutputChannel) -> list[tuple[int, tuple[int, ...]]]:
    """Everything a reader can take without waiting."""
    taken: list[tuple[int, tuple[int, ...]]] = []
    while True:
        reading = asyncio.create_task(channel.get())
        await asyncio.sleep(0)
        if not reading.done():
            reading.cancel()
            return taken
        delta = reading.result()
        if delta is None:
            return taken
        taken.append((delta.index, delta.token_ids))


async def test_the_first_token_comes_at_once_then_every_interval_then_the_rest() -> None:
    channel = OutputChannel(1, interval=3)
    seen = []
    for i in range(9):
        channel.push(token(i, finish_reason="length" if i == 8 else None))
        seen.append(await ready(channel))
    assert seen == [[(0, (0,))], [], [], [(0, (1, 2, 3))], [], [], [(0, (4, 5, 6))], [], [(0, (7, 8))]]


async def test_choices_gather_apart() -> None:
    channel = OutputChannel(2, interval=2)
    channel.push(token(0, 0))
    channel.push(token(10, 1))
    assert await ready(channel) == [(0, (0,)), (1, (10,))]
    channel.push(token(1, 0))
    channel.push(token(11, 1, finish_reason="stop"))
    assert await ready(channel) == [(1, (11,))]
    channel.push(token(2, 0))
    assert await ready(channel) == [(0, (1, 2))]


async def test_what_has_gathered_comes_before_an_error() -> None:
    channel = OutputChannel(1, interval=100)
    for i in range(3):
        channel.push(token(i))
    channel.fail(RequestFault("NaN"))
    assert (await channel.get()).token_ids == (0, 1, 2)
    with pytest.raises(RequestFault):
        await channel.get()


@pytest.mark.parametrize("bare", [False, True])
async def test_a_delta_is_never_longer_than_a_message_may_be(bare: bool) -> None:
    channel = OutputChannel(1)
    for i in range(3 * MERGE_TOKENS):
        push(channel, i, 0, bare and i > 0)
    assert [len(ids) for _, ids in await ready(channel)] == [MERGE_TOKENS] * 3


@given(
    interval=st.integers(1, 5),
    pushes=st.lists(st.integers(0, 2), max_size=40),
    reads=st.lists(st.booleans(), min_size=40, max_size=40),
    bares=st.lists(st.booleans(), min_size=40, max_size=40),
    fails=st.booleans(),
)
def test_nothing_is_lost_or_kept(
    interval: int, pushes: list[int], reads: list[bool], bares: list[bool], fails: bool
) -> None:
    """Whatever the reader's pace, it gets each choice's tokens in order; what it lacks is what is pending."""

    async def play() -> None:
        channel = OutputChannel(3, interval)
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for i, index in enumerate(pushes):
            push(channel, i, index, bares[i] and index in pushes[:i])
            if reads[i]:
                for choice, ids in await ready(channel):
                    got[choice] += ids
            assert channel.num_pending_tokens == i + 1 - sum(map(len, got.values()))
        if fails:
            channel.fail(RequestFault("x"))
        else:
            for index in range(3):
                channel.push(Delta(index, "", (), finish_reason="abort"))
        try:
            while (delta := await channel.get()) is not None:
                got[delta.index] += delta.token_ids
        except RequestFault:
            assert fails
        assert got == {c: [i for i, index in enumerate(pushes) if index == c] for c in range(3)}

    asyncio.run(play())


async def test_what_comes_while_the_gate_is_closed_is_in_the_delta_that_passes() -> None:
    channel, gate = OutputChannel(1), asyncio.Event()
    stream = OutputStream("r", [], channel, abort=list[str]().append)
    channel.push(token(0))
    assert await stream.read() == token(0)
    push_plain = channel.plain_sink(0, lambda i: f"{i},")
    reading = asyncio.create_task(stream.read(gate.wait))
    await asyncio.sleep(0)
    assert channel.num_pending_tokens == 0 and not reading.done(), "nothing to read, nobody is at the gate"
    for i in (1, 2, 3):
        push_plain(i)
        await asyncio.sleep(0)
    assert not reading.done()
    gate.set()
    assert await reading == Delta(0, "1,2,3,", (1, 2, 3))
    channel.push(token(4, finish_reason="length"))
    assert (await stream.read(gate.wait), await stream.read(gate.wait)) == (token(4, finish_reason="length"), None)
