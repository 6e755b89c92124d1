"""Scheduler: what a step computes, and preemption; over a device whose output depends on every block it reads."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.groups import KVGroup
from engine.schedule.sequence import Status
from tests.engine.fake_device import ONE_GROUP
from tests.schedule.rig import BLOCK, Rig


def test_chunks_mix_with_decode_and_only_the_last_samples() -> None:
    """K21: an interior chunk samples nothing and positions go on."""
    rig = Rig(budget=8)
    short = rig.add([1, 2, 3], 4)
    long = rig.add(range(20), 2)
    grants, sampling = [], []
    while (step := rig.iterate()) is not None:
        grants.append(sorted([*zip(step.plan.starts.tolist(), step.plan.num_tokens.tolist(), strict=True)]))
        sampling.append([step.plan.starts.tolist()[e] for e in step.batch.entries.tolist()])
    assert grants[:4] == [[(0, 3), (0, 5)], [(3, 1), (5, 7)], [(4, 1), (12, 7)], [(5, 1), (19, 1)]]
    assert sampling[:4] == [[0], [3], [4], [5, 19]]
    rig.run()
    assert {s.request_id for s in rig.finished} == {short.request_id, long.request_id}
    rig.check_outputs()


def test_rows_that_decode_leave_the_rest_of_the_budget() -> None:
    rig = Rig(budget=8, overlap=1)
    rows = [rig.add([i] * 2, 20) for i in range(3)]
    for _ in range(3):
        rig.iterate()
    assert [s.num_output for s in rows] == [3] * 3
    rig.add([9] * 20, 2)
    step = rig.iterate()
    assert step is not None
    assert step.plan.num_tokens.tolist() == [1, 1, 1, 5]


def test_a_row_that_goes_on_decoding_costs_a_step_no_arrays() -> None:
    """Until its block is full or its last token but one is there; docs/performance.md has what that saves."""
    rig = Rig(overlap=1)
    row = rig.add([1] * 2, 8)
    steps, until = [], []
    while not rig.roster.is_idle:
        steps.append(rig.iterate())
        until.append((row.is_decoding, row.decodes_until))
    assert until == [(True, 0), *[(True, 4)] * 2, *[(True, 8)] * 4, (False, 0)]
    assert [[(u.first, len(u.blocks)) for u in step.plan.block_updates] for step in steps if step is not None] == [
        [(0, 1)], [], [], [(1, 1)], [], [], [], [(2, 1)]
    ]  # fmt: skip
    arrays = [step.decoding.rows for step in steps if step is not None]
    assert [a is b for a, b in pairwise(arrays[1:])] == [True] * 6


def test_the_last_token_is_never_computed() -> None:
    rig = Rig()
    rig.add([1, 2, 3, 4], 1)
    rig.run()
    assert [p.num_tokens.tolist() for p in rig.device.plans] == [[4]]
    rig.check_outputs()


@pytest.mark.parametrize("outputs", range(1, 11))
def test_exactly_what_is_wanted_is_computed(outputs: int) -> None:
    """Wherever in a block the end is, though steps are launched before the one before has settled."""
    rig = Rig()
    rig.add([1] * 3, outputs)
    computed = 0
    while not rig.roster.is_idle:
        step = rig.iterate()
        computed += 0 if step is None else int(step.plan.num_tokens.sum())
    assert computed == 3 + outputs - 1


def test_no_output_wanted_computes_the_prompt_only() -> None:
    rig = Rig(budget=4)
    s = rig.add(range(10), 0)
    rig.run()
    assert s in rig.finished and len(s.token_ids) == 10
    assert sum(sum(p.num_tokens.tolist()) for p in rig.device.plans) == 10


@pytest.mark.parametrize("length", [15, 16, 17])
def test_preemption_at_a_block_edge_changes_nothing(length: int) -> None:
    """K04: the output is what it would have been, and no token comes twice."""
    rig = Rig(num_blocks=3, block_size=16, budget=64)
    rig.add([1] * 15, 20)
    rig.add([2] * length, 10)
    rig.run()
    assert rig.roster.num_preemptions > 0
    assert len(rig.finished) == 2
    rig.check_outputs()


def test_a_victim_comes_after_its_beneficiary_and_is_protected_until_it_progresses() -> None:
    rig = Rig(num_blocks=6, overlap=1)
    first, second, third = rig.add([1] * 4, 12), rig.add([2] * 8, 8), rig.add([3] * 4, 8)
    while rig.roster.num_preemptions == 0:
        rig.iterate()
    assert third.status is Status.WAITING and third.protected
    assert first.status is second.status is Status.RUNNING
    rig.run()
    assert not third.protected
    rig.check_outputs()


@pytest.mark.parametrize("rows", [2, 4, 9])
def test_one_that_does_not_fit_is_passed_over_sixteen_times(rows: int) -> None:
    """However many find a row in one step."""
    rig = Rig(num_blocks=20, max_num_seqs=rows, budget=64, caching=False)
    rig.add([1] * 8, 60)
    big = rig.add([2] * 76, 2)
    small = [rig.add([3, i], 1) for i in range(50)]
    while big.status is Status.WAITING:
        overtook = [s for s in small if s.status is not Status.WAITING]
        rig.iterate()
    assert len(overtook) == big.num_passed_over == 16
    rig.run()
    assert len(rig.finished) == len(rig.sequences)
    rig.check_outputs()


@pytest.mark.parametrize(("unfit", "is_admitted"), [(7, True), (8, False)])
def test_a_step_looks_past_eight_that_do_not_fit(unfit: int, is_admitted: bool) -> None:
    rig = Rig(num_blocks=8, caching=False)
    rig.add([1] * 12, 9)
    rig.iterate()
    for i in range(unfit):
        rig.add([2 + i] * 24, 1)
    small = rig.add([99] * 3, 1)
    rig.iterate()
    assert (small.status is not Status.WAITING) is is_admitted


def test_progress_is_a_token_not_a_chunk() -> None:
    """One that was preempted stays protected while its prompt is computed again."""
    rig = Rig(budget=4, caching=False)
    victim = rig.add([1] * 12, 4)
    while victim.num_output == 0:
        rig.iterate()
    rig.roster.preempt(victim)
    protected = []
    while victim.num_output < 3:
        rig.iterate()
        protected.append((victim.num_computed, victim.protected))
    assert (8, True) in protected
    assert protected[-1][1] is False
    rig.run()
    rig.check_outputs()


def test_a_long_prompt_is_cut_at_the_threshold() -> None:
    rig = Rig(budget=16, threshold=6)
    rig.add(range(20), 1)
    rig.add([1] * 20, 1)
    step = rig.iterate()
    assert step is not None and step.plan.num_tokens.tolist() == [6, 6]
    rig.run()
    rig.check_outputs()


Event = tuple[str, int, int, int, int]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 24), st.integers(0, 10), st.integers(0, 11)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0), st.just(0), st.just(0)),
        *(st.tuples(st.just(kind), st.just(0), st.just(0), st.just(0), st.just(0)) for kind in ("step", "reset")),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(
    events=EVENTS,
    num_blocks=st.integers(9, 24),
    rows=st.integers(2, 4),
    budget=st.integers(4, 40),
    overlap=st.integers(1, 3),
    threshold=st.sampled_from([0, 3]),
    page=st.sampled_from([1, 4]),
    groups=st.sampled_from([ONE_GROUP, (KVGroup(None, (0,)), KVGroup(6, (1,)))]),
    caching=st.booleans(),
)
@pytest.mark.slow
def test_any_history_gives_the_right_tokens(
    events: list[Event],
    num_blocks: int,
    rows: int,
    budget: int,
    overlap: int,
    threshold: int,
    page: int,
    groups: tuple[KVGroup, ...],
    caching: bool,
) -> None:
    """K10, K12, K16: after any adds, aborts, steps and resets the books balance, nothing is lost,
    and every finished choice has the tokens that a plain list gives."""
    num_blocks *= BLOCK // page
    rig = Rig(num_blocks, rows, budget, overlap, caching=caching, block_size=page, threshold=threshold, groups=groups)
    for kind, a, b, c, d in events:
        match kind:
            case "add":
                prompt = [a] * (b // 2) + [a + 1] * (b - b // 2)
                params: dict[str, Any] = {"n": 1 + (d % 2 if c else 0), "prompt_logprobs": 0 if b % 5 == 0 else None}
                rig.add(prompt, c, tenant="xy"[d // 2 % 2], priority=d // 4, **params)
            case "abort" if rig.sequences:
                rig.roster.finish(rig.sequences[a % len(rig.sequences)])
            case "step":
                rig.iterate()
            case "reset":
                rig.roster.kv.reset_prefix_cache()
    rig.run()
    assert rig.roster.is_idle
    assert rig.roster.audit() == []
    assert rig.roster.kv.num_available == num_blocks
    assert all(s.status in (Status.FINISHED, Status.PENDING) for s in rig.sequences)
    rig.check_outputs()
