"""Who waits for blocks that others are computing, and when that is worth settling for."""

from typing import Any

import pytest

from engine.schedule.sequence import Status
from tests.schedule.rig import BLOCK, Rig

PROMPT = [7] * (BLOCK + 1)


def test_the_first_in_line_awaits_a_block_that_is_launched() -> None:
    rig = Rig(threshold=BLOCK)
    assert not rig.scheduler.awaits_blocks(), "nobody waits"
    rig.add(PROMPT, 5)
    assert not rig.scheduler.awaits_blocks(), "nobody computes"
    rig.iterate()
    assert not rig.scheduler.awaits_blocks(), "nobody waits"
    rig.add([8] * 9, 5)
    assert not rig.scheduler.awaits_blocks(), "it wants another block"
    rig.roster.finish(rig.sequences[-1])
    rig.add(PROMPT, 5)
    assert rig.scheduler.awaits_blocks()


def test_it_does_not_await_what_is_not_launched() -> None:
    rig = Rig(threshold=BLOCK // 2)
    rig.add(PROMPT, 5)
    rig.iterate()
    rig.add(PROMPT, 5)
    assert not rig.scheduler.awaits_blocks()


def test_one_of_those_that_compute_a_block_is_enough() -> None:
    rig = Rig(threshold=BLOCK, budget=BLOCK + 2)
    rig.add(PROMPT, 5)
    rig.add(PROMPT, 5, prompt_logprobs=0)  # looks nothing up
    rig.iterate()
    assert [s.num_scheduled for s in rig.sequences] == [BLOCK, 2]
    rig.add(PROMPT, 5)
    assert rig.scheduler.awaits_blocks()


def test_nobody_awaits_blocks_that_could_not_join_the_next_step() -> None:
    for length, budget, rows, expected in ((9, 6, 4, True), (9, 5, 4, False), (9, 6, 1, False)):
        rig = Rig(threshold=BLOCK, budget=budget, max_num_seqs=rows)
        rig.add([7] * length, 5)
        rig.iterate()
        rig.add([7] * length, 5)
        assert rig.scheduler.awaits_blocks() is expected, "5 tokens are pending"


def test_who_waits_for_a_block_is_counted_while_it_waits() -> None:
    rig = Rig()
    rig.add(PROMPT, 5)
    late = rig.add(PROMPT, 5)
    rig.iterate()
    assert rig.scheduler.num_deferred == 1
    rig.roster.finish(late)
    rig.iterate()
    assert rig.scheduler.num_deferred == 0


def test_beams_are_left_alone_while_a_step_is_in_flight() -> None:
    """One that waits to be told its next token is preempted only where nothing else would free a block."""
    rig = Rig(num_blocks=4, overlap=1)
    rig.add([1] * 3, 9, use_beam_search=True)
    rig.iterate()
    assert rig.sequences[0].awaits_branch
    rig.add([2] * 9, 2)
    step = rig.scheduler.schedule()
    assert step is not None
    rig.launch(step)
    rig.add([3] * 9, 2)
    step = rig.scheduler.schedule()
    assert step is not None
    rig.launch(step)
    assert rig.scheduler.schedule() is None
    assert (rig.roster.num_preemptions, rig.roster.num_waiting) == (0, 1)
    rig.settle()
    rig.settle()
    rig.iterate()
    assert (rig.roster.num_preemptions, rig.roster.num_waiting) == (0, 0)


def test_no_more_beams_are_preempted_than_it_takes() -> None:
    rig = Rig(num_blocks=4, overlap=1)
    beams = [rig.add([i] * 3, 9, use_beam_search=True) for i in (1, 2)]
    rig.iterate()
    late = rig.add([3] * 9, 2)
    rig.iterate()
    assert rig.roster.num_preemptions == 1
    assert [s.status for s in (*beams, late)] == [Status.RUNNING, Status.WAITING, Status.RUNNING]


@pytest.mark.parametrize(
    ("settings", "length", "params"), [({"caching": False}, 9, {}), ({}, 9, {"prompt_logprobs": 0}), ({}, BLOCK, {})]
)
def test_who_can_use_nothing_of_a_prefix_does_not_wait_for_it(
    settings: dict[str, Any], length: int, params: dict[str, Any]
) -> None:
    rig = Rig(budget=32, **settings)
    rig.add([7] * length, 5)
    late = rig.add([7] * length, 5, **params)
    rig.iterate()
    assert (late.status, rig.scheduler.num_deferred) == (Status.RUNNING, 0)


def test_without_chunks_a_prompt_needs_the_budget_for_all_that_is_not_cached() -> None:
    rig = Rig(budget=8, chunked=False)
    prompts = [rig.add([i] * length, 3) for i, length in enumerate((8, 6, 1))]
    steps = [rig.iterate(), rig.iterate(), rig.iterate()]
    assert [step.plan.num_tokens.tolist() for step in steps if step] == [[8], [1, 6, 1], [1, 1, 1]]
    assert [s.status for s in prompts] == [Status.RUNNING] * 3
    rig.run()
    late = rig.add([0] * 12, 1)  # eight of them are cached
    rig.run()
    assert (late.num_cached_tokens, late.num_output) == (8, 1)


@pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK + 1])
def test_nobody_waits_for_a_block_that_is_computed_and_forgotten(length: int) -> None:
    rig = Rig()
    rig.add([7] * length, 30)
    for _ in range(2):
        rig.iterate()
    rig.roster.kv.reset_prefix_cache()
    late = rig.add([7] * BLOCK + [8] * 2, 5)
    rig.iterate()
    assert late.status is Status.RUNNING
