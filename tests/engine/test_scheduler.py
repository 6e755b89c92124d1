"""Scheduler, driven step by step over a device whose output depends on every block it reads."""

from collections import deque
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fairness import Fairness
from engine.kv.groups import KVGroup
from engine.kv.manager import KVManager
from engine.request import SamplingParams
from engine.scheduler import MAX_PASSED_OVER, Scheduler
from engine.sequence import Sequence, Status
from engine.step import Step
from tests.engine.fake_device import ONE_GROUP, FakeDevice, expected

BLOCK = 4


class Rig:
    """A scheduler and a device, with up to `overlap` steps in flight; records every finish."""

    def __init__(
        self,
        num_blocks: int = 32,
        max_num_seqs: int = 4,
        budget: int = 16,
        overlap: int = 2,
        chunked: bool = True,
        caching: bool = True,
        block_size: int = BLOCK,
        threshold: int = 0,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
    ) -> None:
        kv = KVManager(groups, num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold,
        )
        self.device = FakeDevice(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, groups=groups)
        self.budget = budget
        self.overlap = overlap
        self.in_flight: deque[Step] = deque()
        self.sequences: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.prompt_ids: dict[Sequence, list[int]] = {}
        self.num_requests = 0
        self.num_steps = 0

    def add(
        self, prompt: Seq[int], max_output: int, *, tenant: str = "", priority: int = 0, **params: object
    ) -> Sequence:
        """Queue a request; its choices are in `sequences`, the first one is returned."""
        sampling = SamplingParams(max_tokens=max_output, **params)  # type: ignore[arg-type]
        name = f"r{self.num_requests}"
        self.num_requests += 1
        choices = [
            Sequence(
                name,
                list(prompt),
                sampling,
                max_output=max_output,
                seed=0,
                index=index,
                tenant=tenant,
                priority=priority,
            )
            for index in range(sampling.num_choices)
        ]
        choices[0].forks = tuple(choices[1:])
        self.sequences += choices
        self.scheduler.add(choices[0])
        return choices[0]

    def iterate(self) -> Step | None:
        """One iteration of the loop: launch, then settle the step before."""
        step = self.scheduler.schedule()
        self.num_steps += 1
        if step is not None:
            assert sum(step.plan.num_tokens.tolist()) <= self.budget
            self.device.forward(step.plan)
            self.device.sample(step.batch)
            self.in_flight.append(step)
        if len(self.in_flight) >= self.overlap or (self.in_flight and step is None):
            self.settle()
        assert self.scheduler.audit() == []
        return step

    def settle(self) -> None:
        step = self.in_flight.popleft()
        result = self.device.run_until(step.plan.step)
        for settled in self.scheduler.settle(step, result).others:
            if settled.prompt_rows:
                assert result.prompt_logprobs is not None
                ids = result.prompt_logprobs.top_ids[settled.prompt_rows.start : settled.prompt_rows.stop, 0]
                self.prompt_ids.setdefault(settled.sequence, []).extend(ids.tolist())
            if settled.finish is not None:
                self.finished.append(settled.sequence)

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if self.scheduler.is_idle:
                return
            self.iterate()
        raise AssertionError("the scheduler makes no progress")

    def check_outputs(self) -> None:
        for s in self.sequences:
            if s.status is Status.FINISHED and s in self.finished:
                prompt = s.token_ids[: s.prompt_len]
                assert s.token_ids[s.prompt_len :] == expected(prompt, s.max_output, s.index)
                if s.params.prompt_logprobs is not None and s.index == 0:
                    assert self.prompt_ids.get(s, []) == prompt[1:]


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


def test_the_last_token_is_never_computed() -> None:
    rig = Rig()
    rig.add([1, 2, 3, 4], 1)
    rig.run()
    assert [p.num_tokens.tolist() for p in rig.device.plans] == [[4]]
    rig.check_outputs()


def test_no_output_wanted_computes_the_prompt_only() -> None:
    rig = Rig(budget=4)
    s = rig.add(range(10), 0)
    rig.run()
    assert s in rig.finished and len(s.token_ids) == 10
    assert sum(sum(p.num_tokens.tolist()) for p in rig.device.plans) == 10


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_the_same_prompt_twice(length: int, cached: int) -> None:
    """K05: hits are whole blocks and at least the last token is computed."""
    rig = Rig(budget=64, block_size=16)
    prompt = [(7 * i) % 50 for i in range(length)]
    first = rig.add(prompt, 3)
    rig.run()
    second = rig.add(prompt, 3)
    rig.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
    rig.check_outputs()


def test_two_equal_prompts_in_one_step_the_second_waits_and_then_hits() -> None:
    """It must not "hit" blocks that the first has not computed, and need not compute them again."""
    rig = Rig(budget=64)
    a, b = rig.add(range(9), 4), rig.add(range(9), 4)
    step = rig.iterate()
    assert step is not None and [e.sequence for e in step.entries] == [a]
    assert b.status is Status.WAITING
    rig.run()
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)
    rig.check_outputs()


def test_waiting_for_a_prefix_holds_up_nobody_else() -> None:
    rig = Rig(budget=8, max_num_seqs=4)
    rig.add(range(32), 1)
    same = [rig.add(range(32), 1) for _ in range(20)]
    other = rig.add([9] * 3, 1)
    while other.status is Status.WAITING:
        rig.iterate()
    assert all(s.status is Status.WAITING for s in same)
    rig.run()
    assert {s.num_cached_tokens for s in same} == {28}
    rig.check_outputs()


def test_waiting_ends_when_the_one_that_computes_is_aborted() -> None:
    rig = Rig(budget=8)
    a, b = rig.add(range(32), 1), rig.add(range(32), 1)
    rig.iterate()
    rig.scheduler.finish(a)
    rig.run()
    assert b in rig.finished
    rig.check_outputs()


def test_generated_tokens_are_reused() -> None:
    rig = Rig()
    first = rig.add(range(4), 9)
    rig.run()
    turn = rig.add([*first.token_ids, 5], 2)
    rig.run()
    assert turn.num_cached_tokens == 12
    rig.check_outputs()


def test_cached_tokens_are_counted_when_the_request_gets_in() -> None:
    """K12: a hit that was seen while there was no room, and evicted since, is not relied on."""
    rig = Rig(num_blocks=8, budget=64)
    prompt = list(range(8))
    rig.add(prompt, 1)
    rig.run()
    rig.add([50] * 20, 9)
    late = rig.add([*prompt, *range(8, 15)], 2)
    rig.iterate()
    assert late.status is Status.WAITING and rig.scheduler.kv.match(late.token_ids, "")[0]
    while late.status is Status.WAITING:
        rig.iterate()
    rig.run()
    assert late.num_cached_tokens == 4, "the second of its two blocks was evicted"
    rig.check_outputs()


def test_prompt_logprobs_skip_the_look_up_but_store() -> None:
    rig = Rig()
    rig.add(range(9), 1)
    rig.run()
    s = rig.add(range(9), 1, prompt_logprobs=0)
    rig.run()
    assert s.num_cached_tokens == 0
    targets = rig.device.plans[-1].prompt_targets
    assert targets is not None and targets.tolist() == [*range(1, 9), -1]


@pytest.mark.parametrize("length", [15, 16, 17])
def test_preemption_at_a_block_edge_changes_nothing(length: int) -> None:
    """K04: the output is what it would have been, and no token comes twice."""
    rig = Rig(num_blocks=3, block_size=16, budget=64)
    rig.add([1] * 15, 20)
    rig.add([2] * length, 10)
    rig.run()
    assert rig.scheduler.num_preemptions > 0
    assert len(rig.finished) == 2
    rig.check_outputs()


def test_a_victim_comes_after_its_beneficiary_and_is_protected_until_it_progresses() -> None:
    rig = Rig(num_blocks=6, overlap=1)
    first, second, third = rig.add([1] * 4, 12), rig.add([2] * 8, 8), rig.add([3] * 4, 8)
    while rig.scheduler.num_preemptions == 0:
        rig.iterate()
    assert third.status is Status.WAITING and third.protected
    assert first.status is second.status is Status.RUNNING
    rig.run()
    assert not third.protected
    rig.check_outputs()


def test_one_that_does_not_fit_is_passed_over_but_not_for_ever() -> None:
    rig = Rig(num_blocks=20, max_num_seqs=2, budget=64, caching=False)
    rig.add([1] * 8, 60)
    big = rig.add([2] * 76, 2)
    small = [rig.add([3, i], 1) for i in range(50)]
    while big.status is Status.WAITING:
        rig.iterate()
    overtook = [s for s in small if s in rig.finished]
    assert MAX_PASSED_OVER <= len(overtook) <= MAX_PASSED_OVER + 1
    rig.run()
    assert len(rig.finished) == len(rig.sequences)
    rig.check_outputs()


def test_requests_that_end_in_their_first_step_give_rows_back() -> None:
    """K18"""
    rig = Rig(budget=4)
    for i in range(200):
        rig.add([i % 7] * (1 + i % 9), 1)
    rig.run()
    assert len(rig.finished) == 200
    assert rig.scheduler.is_idle and rig.scheduler.kv.num_available == 32
    rig.check_outputs()


def test_one_row_serves_a_queue_with_aborts_in_order() -> None:
    """K23"""
    rig = Rig(max_num_seqs=1)
    sequences = [rig.add([i] * 5, 3) for i in range(10)]
    for s in sequences[2:5]:
        rig.scheduler.finish(s)
    rig.run()
    assert [s.request_id for s in rig.finished] == [s.request_id for s in sequences if s not in sequences[2:5]]
    rig.check_outputs()


def test_a_finished_row_waits_for_the_step_launched_before() -> None:
    """The step in flight still writes the blocks: nobody gets them before it has settled."""
    rig = Rig(num_blocks=6, budget=64, overlap=3)
    first = rig.add([1] * 8, 8)
    rig.iterate()
    rig.iterate()
    blocks = set(first.tables[0].blocks)
    rig.scheduler.finish(first)
    assert len(rig.scheduler.fence) == 1
    late = rig.add([2] * 8, 2)
    step = rig.scheduler.schedule()
    assert step is not None and not blocks & set(late.tables[0].blocks)
    rig.device.forward(step.plan)
    rig.device.sample(step.batch)
    rig.in_flight.append(step)
    rig.settle()
    assert len(rig.scheduler.fence) == 1
    rig.settle()
    assert len(rig.scheduler.fence) == 0
    rig.run()
    rig.check_outputs()


def test_an_abandoned_step_ends_its_rows_only() -> None:
    rig = Rig(budget=8)
    doomed = rig.add([1] * 8, 4)
    step = rig.iterate()
    assert step is not None
    spared = rig.add([2] * 3, 4)
    assert rig.scheduler.abandon(rig.in_flight.popleft()) == [doomed]
    rig.device.run_until(step.plan.step)
    rig.run()
    assert doomed.status is Status.FINISHED and spared in rig.finished
    assert rig.scheduler.audit() == [] and rig.scheduler.is_idle


# -- choices ----------------------------------------------------------------------------------


def test_choices_share_the_prompt_and_copy_what_they_write() -> None:
    rig = Rig(num_blocks=32, budget=64)
    rig.add(range(10), 6, n=3)
    first = rig.iterate()
    assert first is not None
    assert sum(first.plan.num_tokens.tolist()) == 10, "the prompt is computed once"
    assert first.batch.entries.tolist() == [0, 0, 0] and len(set(first.batch.rows.tolist())) == 3
    second = rig.iterate()
    assert second is not None
    a, b, c = rig.sequences
    assert a.tables[0].blocks[:2] == b.tables[0].blocks[:2] == c.tables[0].blocks[:2]
    assert len({s.tables[0].blocks[2] for s in rig.sequences}) == 3
    assert len(second.plan.block_copies) == 2, "the last of three writes in place"
    rig.run()
    assert rig.sequences[0].token_ids != rig.sequences[1].token_ids
    assert len(rig.finished) == 3
    rig.check_outputs()


def test_choices_at_a_block_edge_need_no_copy() -> None:
    rig = Rig(budget=64)
    rig.add(range(8), 6, n=2)
    rig.run()
    assert not any(p.block_copies for p in rig.device.plans)
    rig.check_outputs()


def test_a_group_waits_for_all_its_rows() -> None:
    rig = Rig(max_num_seqs=3)
    rig.add([1], 6)
    group = rig.add([2] * 5, 3, n=3)
    rig.iterate()
    assert group.status is Status.WAITING
    rig.run()
    assert len(rig.finished) == 4
    rig.check_outputs()


def test_aborting_choices_before_they_fork_gives_their_rows_back() -> None:
    rig = Rig(budget=4)
    rig.add(range(10), 3, n=3)
    rig.iterate()
    rig.scheduler.finish(rig.sequences[2])
    rig.run()
    assert len(rig.finished) == 2 and rig.scheduler.is_idle
    rig.check_outputs()


# -- fairness, in virtual time: steps -----------------------------------------------------------


def steps_to_first_token(rig: Rig, sequence: Sequence) -> int:
    start = rig.num_steps
    while sequence.num_output == 0:
        rig.iterate()
    return rig.num_steps - start


@pytest.mark.parametrize(("prompt_len", "output_len"), [(4, 400), (60, 4), (200, 1), (8, 40)])
def test_a_flooding_tenant_does_not_delay_another(prompt_len: int, output_len: int) -> None:
    """Its TTFT stays within twice of what it is alone, whether the flood is of prompts or of outputs."""
    prompt = [5] * 30
    alone = Rig(num_blocks=400, budget=16)
    ttft_alone = steps_to_first_token(alone, alone.add(prompt, 4, tenant="b"))
    rig = Rig(num_blocks=400, budget=16)
    for i in range(40):
        rig.add([i] * prompt_len, output_len, tenant="a")
    for _ in range(50):
        rig.iterate()
    late = rig.add(prompt, 4, tenant="b")
    assert steps_to_first_token(rig, late) <= 2 * ttft_alone
    rig.run(20_000)
    assert len(rig.finished) == 41
    rig.check_outputs()


def test_tenants_get_equal_service_while_both_want_it() -> None:
    """Per tenant, not per request: one sends eight times as many."""
    rig = Rig(num_blocks=64, max_num_seqs=2, budget=16, caching=False)
    for i in range(80):
        rig.add([1, i], 6, tenant="many")
        if i % 8 == 0:
            rig.add([2, i], 6, tenant="few")
    done = {"many": 0, "few": 0}
    while done["few"] < 10:
        rig.iterate()
        done = {t: sum(s.tenant == t for s in rig.finished) for t in done}
    assert 8 <= done["many"] <= 13
    rig.run()


def test_a_tenant_that_idled_saved_nothing_up() -> None:
    fairness = Fairness()
    fairness.arrive("a")
    fairness.charge("a", 1000, 0)
    fairness.arrive("b")
    assert fairness.served("b") == 1000
    fairness.leave("b")
    fairness.charge("a", 500, 100)
    fairness.arrive("b")
    assert fairness.served("b") == fairness.served("a") == 1700


def test_tenants_do_not_share_cached_prefixes() -> None:
    rig = Rig()
    rig.add(range(9), 1, tenant="a")
    rig.run()
    other, same = rig.add(range(9), 1, tenant="b"), rig.add(range(9), 1, tenant="a")
    rig.run()
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 8)


def test_priority_goes_first_and_may_preempt() -> None:
    rig = Rig(max_num_seqs=2)
    low = [rig.add([i], 60, priority=5) for i in range(4)]
    for _ in range(4):
        rig.iterate()
    urgent = rig.add([9] * 3, 2, priority=-1)
    steps_to_first_token(rig, urgent)
    assert rig.scheduler.num_preemptions == 1
    assert sum(s.status is Status.RUNNING for s in low) == 1
    rig.run()
    assert len(rig.finished) == 5
    rig.check_outputs()


def test_choices_are_not_preempted_for_blocks_that_their_siblings_keep() -> None:
    """Four choices share eight blocks and have one each: giving up one of them frees one, not nine; and their
    tenant is above its share by one only."""
    rig = Rig(num_blocks=14, max_num_seqs=6, budget=64)
    rig.add(range(32), 4, n=4, tenant="a")
    for _ in range(3):
        rig.iterate()
    late = rig.add([9] * 20, 2, tenant="b")
    while late.status is Status.WAITING:
        rig.iterate()
        assert rig.scheduler.num_preemptions == 0 or late.status is Status.RUNNING
    rig.run()
    rig.check_outputs()


def test_equal_priorities_do_not_preempt_for_admission() -> None:
    rig = Rig(max_num_seqs=2)
    for i in range(6):
        rig.add([i], 20)
    rig.run()
    assert rig.scheduler.num_preemptions == 0


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
                params = {"n": 1 + (d % 2 if c else 0), "prompt_logprobs": 0 if b % 5 == 0 else None}
                rig.add(prompt, c, tenant="xy"[d // 2 % 2], priority=d // 4, **params)
            case "abort" if rig.sequences:
                rig.scheduler.finish(rig.sequences[a % len(rig.sequences)])
            case "step":
                rig.iterate()
            case "reset":
                rig.scheduler.kv.reset_prefix_cache()
    rig.run()
    assert rig.scheduler.is_idle
    assert rig.scheduler.audit() == []
    assert rig.scheduler.kv.num_available == num_blocks
    assert all(s.status in (Status.FINISHED, Status.PENDING) for s in rig.sequences)
    rig.check_outputs()
