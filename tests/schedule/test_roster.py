"""What sequences hold, and what becomes of it."""

import pytest

from engine.kv.fence import Fenced
from engine.kv.manager import BlockTable
from engine.schedule.sequence import Status
from tests.schedule.rig import BLOCK, Rig


def test_choices_stand_where_their_request_does() -> None:
    rig = Rig(max_num_seqs=8, budget=64)
    for i in range(3):
        rig.add([i] * 3, 3, n=2)
    rig.iterate()
    assert [(s.request_id, s.index) for s in rig.roster.running] == [(f"r{i}", k) for i in range(3) for k in range(2)]
    rig.run()
    assert rig.roster.order.fairness.num_present == 0


def test_choices_have_the_hit_of_their_prompt() -> None:
    rig = Rig(max_num_seqs=8)
    rig.add([7] * 3 * BLOCK, 1)
    rig.run()
    rig.add([7] * 3 * BLOCK, 2, n=2)
    rig.run()
    assert [s.num_cached_tokens for s in rig.sequences[1:]] == [2 * BLOCK] * 2


def test_what_is_preempted_has_nothing_and_is_counted() -> None:
    rig = Rig()
    sequence = rig.add([1] * 9, 5, n=2)
    rig.iterate()
    rig.roster.preempt(sequence)
    assert (sequence.status, sequence.num_scheduled, sequence.num_computed) == (Status.WAITING, 0, 0)
    assert (sequence.tables, sequence.is_decoding, sequence.decodes_until) == ([], False, 0)
    assert (sequence.protected, rig.roster.num_preemptions, rig.roster.num_waiting) == (True, 1, 1)
    rig.run()
    rig.check_outputs()


def test_a_tenant_is_present_until_its_last_request_ends() -> None:
    rig = Rig(max_num_seqs=1)
    a, b = rig.add([1], 3, tenant="a"), rig.add([2], 3, tenant="b")
    assert rig.roster.waiting_by_tenant() == {"a": 1, "b": 1}
    rig.iterate()
    assert rig.roster.waiting_by_tenant() == {"b": 1}
    for sequence in (a, a, b):  # the second time changes nothing
        rig.roster.finish(sequence)
    assert (rig.roster.order.fairness.num_present, rig.roster.num_waiting) == (0, 0)


def test_a_step_in_flight_is_not_idle() -> None:
    rig = Rig()
    assert rig.roster.is_idle
    sequence = rig.add([1] * 9, 5)
    assert not rig.roster.is_idle
    rig.iterate()
    rig.roster.finish(sequence)
    assert not rig.roster.is_idle, "its step is in flight"
    assert (len(rig.roster.fence), rig.roster.num_free_rows, rig.roster.kv.num_available) == (1, 3, 29)
    assert rig.roster.audit() == []
    rig.settle()
    assert rig.roster.is_idle
    assert (len(rig.roster.fence), rig.roster.num_free_rows, rig.roster.kv.num_available) == (0, 4, 32)


def test_rows_are_taken_from_the_first() -> None:
    rig = Rig(budget=64)
    rig.add([1] * 3, 3, n=2)
    rig.add([2] * 3, 3)
    rig.iterate()
    assert sorted(s.row for s in rig.roster.running) == [0, 1, 2]
    assert rig.roster.num_free_rows == 1


def test_fill_is_the_share_of_used_slots_that_hold_tokens() -> None:
    rig = Rig(caching=False)
    assert rig.roster.kv_fill == 1.0
    rig.add([1] * (2 * BLOCK + 1), 9)
    rig.iterate()
    assert rig.roster.kv_fill == pytest.approx((2 * BLOCK + 1) / (3 * BLOCK))
    rig.add([2] * BLOCK, 9)
    rig.iterate()
    assert rig.roster.kv_fill == pytest.approx((3 * BLOCK + 2) / (4 * BLOCK))


def test_the_audit_names_what_is_wrong() -> None:
    rig = Rig()
    roster = rig.roster
    sequence = rig.add([1] * 5, 5)
    rig.iterate()
    roster.running.remove(sequence)
    problems = roster.audit()
    assert "rows: [] are held while [1, 2, 3] are free" in problems
    assert "0 pages are in block tables, 2 are counted" in problems
    assert len([p for p in problems if p.startswith("group 0: block") and "has 1 references, 0 holders" in p]) == 2
    roster.running.append(sequence)
    assert roster.audit() == []
    sequence.tables[0].blocks.append(sequence.tables[0].blocks[0])
    assert "3 pages are in block tables, 2 are counted" in roster.audit()
    sequence.tables[0].blocks.pop()
    (block, _) = sequence.tables[0].blocks
    roster.kv._pools[0].mark_cached(block, True)
    assert "group 0: the index and the pool disagree on what is cached" in roster.audit()
    roster.kv._pools[0].mark_cached(block, False)
    roster.finish(sequence)
    rig.settle()
    roster.fence._waiting.append((9, Fenced(((),), ())))
    assert "idle with 1 fenced leases" in roster.audit()


def test_tables_are_given_back_once() -> None:
    rig = Rig()
    tables = rig.roster.kv.begin([[]], 9, "")
    assert tables is not None and isinstance(tables[0], BlockTable)
    assert rig.roster.kv.num_pages == 3
    lease = rig.roster.kv.detach(tables)
    assert (rig.roster.kv.num_pages, rig.roster.kv.detach(tables)) == (0, ((),))
    rig.roster.kv.release(lease)
    assert rig.roster.kv.num_available == 32
