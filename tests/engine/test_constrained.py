"""Rows under a grammar in the loop, on the fake device: a step's masks follow from the tokens of the step before."""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import InvalidRequest, StepFault
from engine.grammar.masks import Constrained, Masks
from tests.engine.fake_device import VOCAB, FakeDevice, expected
from tests.engine.server import Server, collect, serving, tokens_of

WORDS = -(-VOCAB // 32)


class Chain:
    """A grammar that allows one token: that after the last one. It ends at `end`, and breaks at `broken`."""

    def __init__(self, first: int, end: int, broken: int) -> None:
        self.next, self.has_ended = first, False
        self.error: InvalidRequest | None = None
        self._end, self._broken = end, broken

    def advance(self, token_id: int) -> None:
        assert not self.has_ended
        assert token_id == self.next, "the mask did not follow from the token before"
        self.next += 1
        self.error = InvalidRequest("structured_outputs.regex", "too complex") if token_id == self._broken else None
        self.has_ended = token_id == self._end or self.error is not None


def chain(first: int, end: int = -1, broken: int = -1) -> dict[str, Any]:
    return {"make_grammar": lambda: Chain(first, end, broken)}


class ChainMasks(Masks):
    """Remembers what the device had been asked for when masks were made."""

    def __init__(self) -> None:
        super().__init__(0, VOCAB, VOCAB)
        self.device: FakeDevice
        self.seen: list[list[tuple[str, int]]] = []

    def fill(self, num_rows: int, constrained: Seq[Constrained]) -> NDArray[np.uint32]:
        self.seen.append(list(self.device.log))
        masks = np.full((num_rows, WORDS), 0xFFFFFFFF, np.uint32)
        grammar: Any
        for index, grammar in constrained:
            masks[index] = 0
            masks[index, grammar.next // 32] = 1 << grammar.next % 32
        return masks


@asynccontextmanager
async def constrained(**settings: Any) -> AsyncIterator[tuple[Server, ChainMasks]]:
    masks = ChainMasks()
    async with serving(masks=masks, **settings) as server:
        masks.device = server.device
        yield server, masks


async def test_masks_are_made_between_the_forward_pass_and_the_sampling_of_a_step() -> None:
    """The step before has settled by then, and the forward pass of this one is on its way."""
    async with constrained() as (server, masks):
        assert await tokens_of(server.generate([1, 2, 3], 5, **chain(10))) == [10, 11, 12, 13, 14]
        assert await server.is_clean()
    for step, log in enumerate(masks.seen, 1):
        assert log[-1] == (("forward", 1) if step == 1 else ("result", step - 1))
        assert ("forward", step) in log
        assert ("result", step) not in log


async def test_rows_without_a_grammar_are_what_they_are_alone() -> None:
    """Also a prompt in chunks beside them, and rows that come and go."""
    async with constrained(max_num_seqs=8) as (server, _):
        streams = [
            server.generate([1, 2, 3], 9),
            server.generate([7] * 40, 6, **chain(100)),
            server.generate([4, 5], 3),
            server.generate([9], 12, **chain(200)),
        ]
        outputs = await asyncio.gather(*map(tokens_of, streams))
        assert await server.is_clean()
    assert outputs[0] == expected([1, 2, 3], 9)
    assert outputs[1] == list(range(100, 106))
    assert outputs[2] == expected([4, 5], 3)
    assert outputs[3] == list(range(200, 212))


async def test_a_grammar_that_ends_ends_the_output_without_an_end_id() -> None:
    async with constrained() as (server, _):
        streams = [server.generate([1, 2, 3], 9, **chain(10, end=12)), server.generate([1, 5], 9, **chain(7, end=7))]
        outputs = await asyncio.gather(*map(collect, streams))
        assert await server.is_clean()
    for deltas, ids in zip(outputs, ([10, 11, 12], [7]), strict=True):
        assert [t for d in deltas for t in d.token_ids] == ids
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)


async def test_a_stop_id_or_max_tokens_ends_it_sooner() -> None:
    async with constrained() as (server, _):
        stopped = await collect(server.generate([1, 2], 9, stop_token_ids=(12,), **chain(10, end=14)))
        cut = await collect(server.generate([1, 2], 3, **chain(10, end=14)))
        assert await server.is_clean()
    assert (stopped[-1].finish_reason, stopped[-1].stop_reason) == ("stop", 12)
    assert cut[-1].finish_reason == "length"


async def test_each_choice_has_a_grammar_of_its_own() -> None:
    async with constrained() as (server, _):
        starts = iter((100, 200, 300))
        stream = server.generate([1, 2, 3], 4, n=3, make_grammar=lambda: Chain(next(starts), -1, -1))
        deltas = await collect(stream)
        assert await server.is_clean()
    outputs = [[t for d in deltas if d.index == i for t in d.token_ids] for i in range(3)]
    assert outputs == [list(range(100 * i, 100 * i + 4)) for i in (1, 2, 3)]


async def test_preemption_keeps_the_place_in_the_grammar() -> None:
    """Six rows of 30 tokens in 16 blocks of 4: most are preempted, and go on where they were."""
    async with constrained(num_blocks=16, max_num_seqs=6) as (server, _):
        streams = [server.generate([i, i + 1], 30, **chain(100 * i)) for i in range(1, 7)]
        outputs = await asyncio.gather(*map(tokens_of, streams))
        assert server.roster.num_preemptions > 0
        assert await server.is_clean()
    assert outputs == [list(range(100 * i, 100 * i + 30)) for i in range(1, 7)]


async def test_a_grammar_that_cannot_go_on_fails_its_request_alone() -> None:
    async with constrained() as (server, _):
        broken = server.generate([1, 2], 9, **chain(10, broken=12))
        other = server.generate([3, 4], 9, **chain(20))
        with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex: too complex"):
            await collect(broken)
        assert await tokens_of(other) == list(range(20, 29))
        assert await server.is_clean()


async def test_a_step_that_fails_while_the_next_one_waits_for_its_masks() -> None:
    async with constrained() as (server, _):
        server.device.faults[3] = StepFault("broken")
        with pytest.raises(StepFault, match="broken"):
            await collect(server.generate([1, 2, 3], 9, **chain(10)))
        assert await tokens_of(server.generate([1, 2, 3], 3, **chain(10))) == [10, 11, 12]
        assert await server.is_clean()


@pytest.mark.parametrize("step", range(1, 5))
async def test_abort_while_the_loop_waits_for_a_step(step: int) -> None:
    async with constrained(free_running=False) as (server, _):
        stream = server.generate([1, 2, 3], 20, **chain(10))
        other = server.generate([4, 5], 20, **chain(100))
        await server.until(lambda: ("forward", 1) in server.device.log)
        server.device.open(step)
        await server.until(lambda: ("result", step) in server.device.log)
        stream.cancel()
        server.device.open(10**9)
        assert await tokens_of(other) == list(range(100, 120))
        assert await server.is_clean()
