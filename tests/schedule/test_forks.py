"""The choices of a request in the scheduler: where they part, what they share, what they copy."""

from engine.schedule.sequence import Status
from tests.schedule.rig import Rig


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
    rig.roster.finish(rig.sequences[2])
    rig.run()
    assert len(rig.finished) == 2 and rig.roster.is_idle
    rig.check_outputs()


def test_choices_are_not_preempted_for_blocks_that_their_siblings_keep() -> None:
    """Four choices share eight blocks and have one each: giving up one of them frees one, not nine; and their
    tenant is above its share by one only."""
    rig = Rig(num_blocks=14, max_num_seqs=6, budget=64)
    rig.add(range(32), 4, n=4, tenant="a")
    for _ in range(3):
        rig.iterate()
    late = rig.add([9] * 20, 2, tenant="b")
    while late.status is not Status.RUNNING:
        assert rig.roster.num_preemptions == 0
        rig.iterate()
    rig.run()
    rig.check_outputs()
