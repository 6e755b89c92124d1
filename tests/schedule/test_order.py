"""Who goes before whom, among tenants and by priority, in virtual time: steps."""

import pytest

from engine.schedule.order import Fairness
from engine.schedule.sequence import Status
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
