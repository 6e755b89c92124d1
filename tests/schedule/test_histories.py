"""Histories that once went wrong, each small enough to read; random ones are in tests/soak."""

import asyncio
from typing import Any

import pytest

from engine.errors import DeviceFault, EngineStopped
from tests.engine.fake_device import expected
from tests.engine.server import collect, serving
from tests.engine.test_choices import naive_beam_search, search


async def test_aborting_best_of_with_an_ended_choice_ends_the_stream() -> None:
    """Ended choices are held back under best_of; the abort must speak for them, too."""
    stop = expected([1, 2], 2, 0)[-1]
    assert stop not in expected([1, 2], 60, 1)
    async with serving() as server:
        stream = server.generate([1, 2], 60, n=2, best_of=3, stop_token_ids=[stop])
        await server.until(lambda: len(server.device.plans) > 5)
        stream.cancel()
        async with asyncio.timeout(5):
            deltas = await collect(stream)
        assert [(d.index, d.finish_reason, d.token_ids) for d in deltas] == [(0, "abort", ()), (1, "abort", ())]
        assert await server.is_clean()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
async def test_beams_that_fit_only_one_at_a_time_take_turns(width: int, caching: bool) -> None:
    """A beam waits for its siblings with its blocks; one that was preempted needs them, and nobody else runs."""
    prompt = list(range(17))
    async with serving(num_blocks=8, budget=8, caching=caching) as server:
        wanted = [ids for _, ids in naive_beam_search(prompt, width, 14, set(), 1.0)[:2]]
        async with asyncio.timeout(5):
            assert await search(server, prompt, width, 14) == wanted
        assert server.roster.num_preemptions > 0
        assert await server.is_clean()


@pytest.mark.parametrize("num_blocks", range(10, 20))
async def test_beams_branch_from_beams_that_were_preempted(num_blocks: int) -> None:
    """A beam whose source has lost its blocks loses its own, also when another continues from it."""
    prompts = [[i, 6, 7, 8, 9] for i in range(3)]
    async with serving(num_blocks=num_blocks, budget=8, max_num_seqs=6) as server:
        searches = [asyncio.create_task(search(server, prompt, 3, 20)) for prompt in prompts]
        async with asyncio.timeout(5):
            found = [await s for s in searches]
        assert found == [[ids for _, ids in naive_beam_search(p, 3, 20, set(), 1.0)[:2]] for p in prompts]
        assert await server.is_clean()


async def test_a_beam_of_one_is_greedy() -> None:
    async with serving(max_num_seqs=1) as server:
        deltas = await collect(server.generate([3, 4], 9, use_beam_search=True, temperature=0))
        assert [t for d in deltas for t in d.token_ids] == expected([3, 4], 9)
        assert await server.is_clean()


async def test_a_request_that_can_use_every_block_runs_beside_others_that_then_wait() -> None:
    """K01's other half: what fits alone finishes, however crowded it is."""
    async with serving(num_blocks=8, budget=32) as server:
        crowd = [asyncio.create_task(collect(server.generate([i] * 9, 20))) for i in range(6)]
        big = server.generate([7] * 24, 8)
        async with asyncio.timeout(5):
            assert [t for d in await collect(big) for t in d.token_ids] == expected([7] * 24, 8)
            for i, task in enumerate(crowd):
                assert [t for d in await task for t in d.token_ids] == expected([i] * 9, 20)
        assert await server.is_clean()


@pytest.mark.parametrize("which", [0, 1])
async def test_end_ids_of_the_model_and_stop_ids_of_the_user(which: int) -> None:
    """L24, T17: either of two end ids stops; under ignore_eos neither does, a user's stop id does."""
    ids = expected([1, 2], 12)
    end = ids[4]
    ends = (998, end) if which else (end, 998)
    async with serving() as server:

        async def outcome(**params: Any) -> tuple[list[int], object, object]:
            deltas = await collect(server.generate([1, 2], 12, eos=ends, **params))
            return [t for d in deltas for t in d.token_ids], deltas[-1].finish_reason, deltas[-1].stop_reason

        first = ids.index(end) + 1
        assert await outcome() == (ids[:first], "stop", None)
        assert await outcome(ignore_eos=True) == (ids, "length", None)
        assert await outcome(ignore_eos=True, stop_token_ids=[end]) == (ids[:first], "stop", end)


async def test_nobody_waits_for_a_loop_that_has_ended() -> None:
    async with serving() as server:
        server.device.faults[1] = DeviceFault("gone")
        doomed = server.generate([1], 3)
        with pytest.raises(DeviceFault, match="gone"):
            await collect(doomed)
        await asyncio.wait([server.task])
        for ask in (lambda: server.inbox.control(server.roster.audit), lambda: collect(server.generate([1], 3))):
            with pytest.raises(EngineStopped, match="the engine is failed"):
                async with asyncio.timeout(5):
                    await ask()
        doomed.cancel()
        assert server.inbox.num_messages == 0
