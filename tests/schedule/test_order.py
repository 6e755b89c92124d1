"""Who goes before whom, among tenants and by priority, in virtual time: steps."""

import pytest

from engine.request.params import SamplingParams
from engine.schedule.order import Fairness, Order
from engine.schedule.sequence import Sequence, Status
from engine.schedule.settle import Branch, branch
from tests.schedule.rig import Rig


@pytest.mark.parametrize(
    ("prompt_len", "output_len"), [pytest.param(4, 400, marks=pytest.mark.slow), (60, 4), (200, 1), (8, 40)]
)
def test_a_flooding_tenant_does_not_delay_another(prompt_len: int, output_len: int) -> None:
    """Its TTFT stays within twice of what it is alone, whether the flood is of prompts or of outputs."""
    prompt = [5] * 30
    alone = Rig(num_blocks=400, budget=16)
    ttft_alone = alone.steps_to_first_token(alone.add(prompt, 4, tenant="b"))
    rig = Rig(num_blocks=400, budget=16)
    for i in range(40):
        rig.add([i] * prompt_len, output_len, tenant="a")
    for _ in range(50):
        rig.iterate()
    late = rig.add(prompt, 4, tenant="b")
    assert rig.steps_to_first_token(late) <= 2 * ttft_alone
    rig.run(20_000)
    assert len(rig.finished) == 41
    rig.check_outputs()


def test_a_client_that_floods_leaves_others_their_rows() -> None:
    """Without tenants, callers are told apart by where they call from; the prefix cache is theirs together."""
    prompt = [5] * 32
    rig = Rig(num_blocks=400, budget=64, max_num_seqs=8)
    for i in range(100):
        rig.add([i] * 8, 500, client="10.0.0.1")
    for _ in range(20):
        rig.iterate()
    late = rig.add(prompt, 4, client="10.0.0.2")
    assert rig.steps_to_first_token(late) <= 5  # two of them for steps in flight
    assert late.cache_root == rig.sequences[0].cache_root
    assert rig.roster.waiting_by_tenant().keys() == {""}


def test_counters_of_clients_that_have_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.schedule.order.MAX_REMEMBERED", 10)
    fairness = Fairness()
    fairness.arrive("stays")
    for i in range(100):
        fairness.arrive(f"client {i}")
        fairness.charge(f"client {i}", 5, 5)
        fairness.leave(f"client {i}")
    assert len(fairness._served) <= 11 and fairness.served("stays") == 0


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


def test_a_tenant_is_charged_once_for_a_prompt_however_often_it_is_computed() -> None:
    """9 prompt tokens, and 3 outputs at twice their price."""
    rig = Rig(budget=4, threshold=4)
    sequence = rig.add([1] * 9, 3)
    for _ in range(4):
        rig.iterate()
    rig.roster.preempt(sequence)
    rig.run()
    assert (sequence.num_output, rig.roster.order.fairness.served("")) == (3, 15)


def test_a_beams_tokens_are_outputs_not_prompt() -> None:
    rig = Rig(overlap=1)
    beam = rig.add([1] * 3, 9, use_beam_search=True)
    rig.iterate()
    for n in range(3):
        assert beam.awaits_branch and rig.roster.order.fairness.served("") == 3 + 2 * (n + 1)
        branch(rig.roster, [Branch(beam, beam, [*beam.token_ids, 5])])
        rig.iterate()


def test_who_comes_between_two_that_run_takes_from_the_later() -> None:
    rig = Rig(max_num_seqs=2)
    first, last = rig.add([1], 30, priority=-1), rig.add([2], 30, priority=5)
    rig.iterate()
    middle = rig.add([3], 2)
    rig.steps_to_first_token(middle)
    assert (first.status, last.status) == (Status.RUNNING, Status.WAITING)


def test_priority_goes_first_and_may_preempt() -> None:
    rig = Rig(max_num_seqs=2)
    low = [rig.add([i], 60, priority=5) for i in range(4)]
    for _ in range(4):
        rig.iterate()
    urgent = rig.add([9] * 3, 2, priority=-1)
    rig.steps_to_first_token(urgent)
    assert rig.roster.num_preemptions == 1
    assert sum(s.status is Status.RUNNING for s in low) == 1
    rig.run()
    assert len(rig.finished) == 5
    rig.check_outputs()


def test_who_is_admitted_ahead_of_running_rows_leaves_each_a_token() -> None:
    rig = Rig(budget=8)
    running = [rig.add([i] * 3, 9) for i in range(2)]
    while any(s.num_output == 0 for s in running):
        rig.iterate()
    urgent = rig.add([9] * 20, 2, priority=-1)
    step = rig.iterate()
    assert step is not None
    assert dict(zip(step.plan.rows.tolist(), step.plan.num_tokens.tolist(), strict=True)) == {
        urgent.row: 6, running[0].row: 1, running[1].row: 1
    }  # fmt: skip
    rig.run()
    rig.check_outputs()


def test_nobody_is_preempted_for_room_that_is_coming() -> None:
    """The row of one that ended is free when the step in flight has settled."""
    rig = Rig(max_num_seqs=2)
    rows = [rig.add([i] * 3, 30) for i in range(2)]
    for _ in range(3):
        rig.iterate()
    rig.roster.finish(rows[0])
    urgent = rig.add([9] * 3, 2, priority=-1)
    rig.steps_to_first_token(urgent)
    assert (rig.roster.num_preemptions, rows[1].status) == (0, Status.RUNNING)


def test_free_blocks_count_with_those_that_victims_give() -> None:
    rig = Rig(num_blocks=6, budget=32, caching=False)
    low = rig.add([1] * 10, 9, priority=1)  # three blocks
    rig.iterate()
    urgent = rig.add([2] * 24, 1)  # all six: three free and three of the victim's
    rig.steps_to_first_token(urgent)
    assert (rig.roster.num_preemptions, low.status) == (1, Status.WAITING)
    rig.run()
    rig.check_outputs()


def test_who_would_not_make_room_enough_is_not_preempted() -> None:
    rig = Rig(num_blocks=6, budget=32, caching=False)
    low = rig.add([1] * 4, 9, priority=1)
    same = rig.add([2] * 8, 9)
    rig.iterate()
    rig.add([3] * 20, 2)
    rig.iterate()
    assert (rig.roster.num_preemptions, low.status, same.status) == (0, Status.RUNNING, Status.RUNNING)


def test_who_goes_first_waits_where_the_running_rows_need_the_budget() -> None:
    rig = Rig(budget=2, overlap=1)
    running = [rig.add([i], 9) for i in range(2)]
    for _ in range(2):
        rig.iterate()
    urgent = rig.add([9] * 3, 2, priority=-1)
    step = rig.iterate()
    assert step is not None
    assert (step.plan.num_tokens.tolist(), urgent.status) == ([1, 1], Status.WAITING)
    assert [s.status for s in running] == [Status.RUNNING] * 2
    rig.run()
    rig.check_outputs()


def test_a_preempted_row_is_not_admitted_again_before_its_token_in_flight_is_seen() -> None:
    """There is a free row for it: the two choices that it made way for need two at once."""
    rig = Rig(max_num_seqs=3)
    low = [rig.add([i] * 3, 10, priority=5) for i in range(2)]
    for _ in range(3):
        rig.iterate()
    rig.add([9] * 3, 4, priority=-1, n=2)
    rig.iterate()
    assert rig.roster.num_preemptions == 1
    assert [s.status for s in low] == [Status.RUNNING, Status.WAITING]
    rig.run()
    assert len(rig.finished) == 4
    rig.check_outputs()


def test_a_token_in_flight_when_its_row_is_preempted_is_kept_and_is_no_progress() -> None:
    rig = Rig(max_num_seqs=1)
    low = rig.add([1] * 3, 4, priority=1)
    rig.iterate()
    rig.add([2] * 3, 2)
    rig.iterate()
    assert (low.status, low.num_output, low.protected) == (Status.WAITING, 1, True)
    rig.run()
    rig.check_outputs()


def test_equal_priorities_do_not_preempt_for_admission() -> None:
    rig = Rig(max_num_seqs=2)
    for i in range(6):
        rig.add([i], 20)
    rig.run()
    assert rig.roster.num_preemptions == 0


# -- Order by itself: six rows; its rules are those of docs/scheduling.md ------------------------


class Rows:
    """Running and waiting sequences that an Order knows the tenants of."""

    def __init__(self, *tenants: str) -> None:
        self.order, self.num = Order(6), 0
        for tenant in tenants:
            self.order.fairness.arrive(tenant)

    def add(self, tenant: str, *, priority: int = 0, work: int = 0, protected: bool = False) -> Sequence:
        sequence = Sequence(
            f"r{self.num}", [1], SamplingParams(), max_output=9, seed=0, tenant=tenant, priority=priority
        )
        sequence.arrival, sequence.num_scheduled, sequence.protected = self.num, work, protected
        sequence.status = Status.RUNNING
        self.num += 1
        return sequence


def test_one_that_comes_starts_where_the_least_served_one_present_is() -> None:
    fairness = Fairness()
    for tenant in "abc":
        fairness.arrive(tenant)
    for tenant, tokens in (("a", 30), ("b", 10), ("c", 20)):
        fairness.charge(tenant, tokens, 0)
    fairness.leave("b")
    fairness.arrive("d")
    fairness.arrive("b")
    assert [fairness.served(t) for t in "abcd"] == [30, 20, 20, 20]


def test_outputs_cost_their_tenants_twice_what_prompt_tokens_cost() -> None:
    rows = Rows("a", "b")
    rows.order.charge_outputs([rows.add("a"), rows.add("b"), rows.add("a")])
    assert (rows.order.fairness.served("a"), rows.order.fairness.served("b")) == (4, 2)
    alone = Rows("a")
    alone.order.charge_outputs([alone.add("a"), alone.add("a")])
    alone.order.charge_outputs([])
    assert alone.order.fairness.served("a") == 4


def test_who_waits_goes_before_one_that_runs_of_another_tenant_or_priority_only() -> None:
    rows = Rows("a", "b")
    running, urgent = rows.add("a"), rows.add("a", priority=-1)
    same, other = rows.add("a"), rows.add("b")
    running.arrival = 9
    assert not rows.order.comes_before(same, running), "its turn among its tenant's comes by arrival"
    assert rows.order.comes_before(urgent, running)
    assert rows.order.comes_before(other, running)
    rows.order.fairness.charge("b", 1, 0)
    assert not rows.order.comes_before(other, running)
    assert not rows.order.comes_before(running, running)


def test_a_tenant_below_its_share_may_take_what_another_has_above_it() -> None:
    """Of six rows, three each: least work first, down to the share; none that is protected or more urgent."""
    rows = Rows("a", "b")
    busy, fresh, safe, rest = rows.add("a", work=9), rows.add("a"), rows.add("a", protected=True), rows.add("a", work=5)
    urgent = rows.add("a", priority=-1)
    running = [busy, fresh, safe, rest, urgent]
    assert rows.order.preemptible_for(rows.add("b"), running) == [fresh, rest]
    assert rows.order.preemptible_for(rows.add("a"), running) == []
    assert rows.order.preemptible_for(rows.add("b"), running[:3]) == [], "a is at its share"
    two = [rows.add("b"), rows.add("b")]
    assert rows.order.preemptible_for(rows.add("b"), [*running[:4], *two]) == [fresh]
    assert rows.order.preemptible_for(rows.add("b"), [*running[:4], *two, rows.add("b")]) == [], "b is at its share"


def test_a_tenant_without_a_row_is_below_a_share_of_one() -> None:
    rows = Rows(*"abcdef")
    two = [rows.add("a", work=5), rows.add("a")]
    assert rows.order.preemptible_for(rows.add("b"), two) == two[1:]


def test_what_is_less_urgent_may_be_preempted_whoever_has_it() -> None:
    rows = Rows("a", "b")
    low, mine, equal = rows.add("b", priority=2, work=5), rows.add("a", priority=1), rows.add("b", priority=0)
    running = [low, mine, equal, rows.add("a", priority=1, protected=True)]
    assert rows.order.preemptible_for(rows.add("a", priority=0), running) == [mine, low]


def test_the_victim_for_a_block_has_lost_least_and_made_progress() -> None:
    rows = Rows("a")
    older, newer, worked = rows.add("a"), rows.add("a"), rows.add("a", work=1)
    safe = rows.add("a", protected=True)
    assert Order.victim_among([older, newer, worked, safe]) is newer
    assert Order.victim_among([worked, safe]) is worked
    assert Order.victim_among([rows.add("a", protected=True), safe]) is safe, "the last, if all are protected"
    newer.status = Status.WAITING
    assert Order.victim_among([newer, older]) is older
    assert Order.victim_among([newer]) is None
