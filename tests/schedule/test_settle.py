"""What settled steps, aborts and abandoned steps leave: rows and blocks go back, none too early."""

from engine.schedule.sequence import Status
from engine.schedule.settle import Branch, abandon, branch
from tests.schedule.rig import Rig


def test_requests_that_end_in_their_first_step_give_rows_back() -> None:
    """K18"""
    rig = Rig(budget=4)
    for i in range(200):
        rig.add([i % 7] * (1 + i % 9), 1)
    rig.run()
    assert len(rig.finished) == 200
    assert rig.roster.is_idle and rig.roster.kv.num_available == 32
    rig.check_outputs()


def test_one_row_serves_a_queue_with_aborts_and_a_preemption_in_order() -> None:
    """K23"""
    rig = Rig(max_num_seqs=1)
    sequences = [rig.add([i] * 5, 3) for i in range(10)]
    for s in sequences[2:5]:
        rig.roster.finish(s)
    for _ in range(2):
        rig.iterate()
    urgent = rig.add([9] * 3, 2, priority=-1)
    rig.run()
    assert rig.roster.num_preemptions == 1
    assert rig.finished == [urgent, *sequences[:2], *sequences[5:]]
    assert rig.roster.kv.match(sequences[0].token_ids, "")[0], "what the preempted one finds is its own"
    assert {s.num_cached_tokens for s in rig.finished} == {0}
    rig.check_outputs()


def test_a_finished_row_waits_for_the_step_launched_before() -> None:
    """The step in flight still writes the blocks: nobody gets them before it has settled."""
    rig = Rig(num_blocks=6, budget=64, overlap=3)
    first = rig.add([1] * 8, 8)
    rig.iterate()
    rig.iterate()
    blocks = set(first.tables[0].blocks)
    rig.roster.finish(first)
    assert len(rig.roster.fence) == 1
    late = rig.add([2] * 8, 2)
    step = rig.scheduler.schedule()
    assert step is not None and not blocks & set(late.tables[0].blocks)
    rig.launch(step)
    rig.settle()
    assert len(rig.roster.fence) == 1
    rig.settle()
    assert len(rig.roster.fence) == 0
    rig.run()
    rig.check_outputs()


def test_one_that_was_aborted_in_flight_gets_no_token() -> None:
    rig = Rig()
    rows = [rig.add([i] * 3, 9) for i in range(2)]
    for _ in range(3):
        rig.iterate()
    rig.roster.finish(rows[0])
    known = len(rows[0].token_ids), len(rows[1].token_ids)
    rig.run()
    assert (len(rows[0].token_ids), len(rows[1].token_ids)) == (known[0], 12)
    assert rig.finished == rows[1:]


def test_a_beam_that_goes_on_by_itself_keeps_its_tables() -> None:
    rig = Rig(overlap=1)
    beam = rig.add([1] * 3, 9, use_beam_search=True)
    rig.iterate()
    tables = beam.tables
    branch(rig.roster, [Branch(beam, beam, [*beam.token_ids, 5])])
    assert beam.tables is tables and not beam.awaits_branch
    rig.iterate()
    assert beam.num_scheduled == 4


def test_a_row_that_adopts_a_block_tells_the_device_though_it_decodes() -> None:
    """Two rows make the same block in the same steps; `Rig.launch` compares the device's tables with the host's."""
    rig = Rig()
    first = rig.add([7] * 3, 9)
    second = rig.add([7] * 3, 9, prompt_logprobs=0)
    while first.num_output < 4:
        rig.iterate()
    assert first.tables[0].blocks[0] == second.tables[0].blocks[0]
    rig.run()
    rig.check_outputs()


def test_an_abandoned_step_ends_its_rows_only() -> None:
    rig = Rig(budget=8)
    doomed = rig.add([1] * 8, 4)
    step = rig.iterate()
    assert step is not None
    spared = rig.add([2] * 3, 4)
    assert abandon(rig.roster, rig.in_flight.popleft()) == [doomed]
    rig.device.run_until(step.plan.step)
    rig.run()
    assert doomed.status is Status.FINISHED and spared in rig.finished
    assert rig.roster.audit() == [] and rig.roster.is_idle
