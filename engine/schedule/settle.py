"""What the result of a step means for the sequences that were in it.

Tokens are appended, full blocks indexed, sequences that ended are taken out, and the fence opens. A sequence
that was preempted since the launch has computed nothing any more, but has its token.
Read next: `engine/schedule/roster.py`, `engine/loop.py` (who calls it), docs/performance.md.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple, cast

from engine.plan import StepResult
from engine.schedule.roster import Roster
from engine.schedule.sequence import Finish, Sequence, Status
from engine.schedule.step import Entry, Step


class Settled(NamedTuple):
    """What one sequence gained from a settled step.

    Attributes:
        token_id: the new id, None if the step sampled nothing for it.
        sample: index of the id in the step's result.
        prompt_rows: its rows of `StepResult.prompt_logprobs`.
        faulted: the logits held no usable value; the sequence has been finished.
        finish: finish reason and stop reason if it ended.
    """

    sequence: Sequence
    token_id: int | None
    sample: int
    prompt_rows: range
    faulted: bool
    finish: Finish | None


class Settlement(NamedTuple):
    """What a settled step brought: a token each to rows that go on decoding, and everything else.

    Attributes:
        sequences, token_ids, samples: [n]; who goes on decoding, the new ids, their indices in the step's result.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    samples: Seq[int]
    others: list[Settled]


class Branch(NamedTuple):
    """A beam's next state: `target` goes on as `source` does, with these tokens."""

    target: Sequence
    source: Sequence
    token_ids: list[int]


def settle(roster: Roster, step: Step, result: StepResult) -> Settlement:
    """Take in the result of the oldest step in flight."""
    roster.fence.settle(result.step)
    for _, sequence in step.constrained:
        if sequence.grammar is not None and sequence.grammar.has_ended:
            sequence.end_with_next()
    ids = _sampled_ids(result)
    settlement = _settle_decoding(roster, step.decoding.sequences, ids)
    sample, target = len(step.decoding.sequences), 0
    for entry in step.entries:
        rows = range(target, target + len(entry.targets))
        settled = _settle_entry(roster, entry, ids[sample] if entry.samples else None, sample, rows)
        if settled is not None:
            settlement.others.append(settled)
        sample += entry.samples
        target = rows.stop
    return settlement


def abandon(roster: Roster, step: Step) -> list[Sequence]:
    """Give up the oldest step in flight, which failed; ends and returns the sequences in it."""
    roster.fence.settle(step.plan.step)
    launched = [*step.decoding.sequences, *(entry.sequence for entry in step.entries)]
    ended = [sequence for sequence in launched if sequence.status is not Status.FINISHED]
    for sequence in ended:
        roster.finish(sequence)
    return ended


def branch(roster: Roster, branches: list[Branch]) -> None:
    """Give every beam its next tokens and the blocks of the beam it continues.

    No beam is in flight. One that was preempted, or whose source was, computes its tokens again.
    """
    moves = [
        (b.target, roster.kv.fork(b.source.tables), b.source.num_scheduled)
        for b in branches
        if b.target is not b.source and b.target.tables and b.source.tables
    ]
    lost = [b.target for b in branches if b.target.tables and not b.source.tables]
    for target, _, token_ids in branches:
        target.awaits_branch = False
        target.token_ids = token_ids
    for target in lost:
        roster.preempt(target)
    for target, tables, num_scheduled in moves:
        roster.give_up(roster.kv.detach(target.tables))
        target.tables = tables
        target.num_scheduled = target.num_computed = num_scheduled


def _settle_decoding(roster: Roster, sequences: list[Sequence], ids: list[int | None]) -> Settlement:
    """Rows that decoded, each of which had computed all tokens it now has."""
    ended = set[Sequence]()
    running, finished, block_size = Status.RUNNING, Status.FINISHED, roster.kv.block_size
    for sequence, token_id in zip(sequences, ids, strict=False):
        sequence.in_flight -= 1
        token_ids = sequence.token_ids
        num_computed = len(token_ids)
        if sequence.status is running:
            if not num_computed % block_size:
                sequence.num_computed = num_computed
                _index(roster, sequence)
        elif sequence.status is finished:
            ended.add(sequence)
            continue
        if token_id is not None:
            token_ids.append(token_id)
            if token_id not in sequence.stopping_ids and num_computed + 1 < sequence.max_len:
                continue
        ended.add(sequence)
    if not ended:
        return Settlement(sequences, cast("list[int]", ids[: len(sequences)]), range(len(sequences)), [])
    samples = [sample for sample, s in enumerate(sequences) if s not in ended]
    others = [_end(roster, s, ids[i], i) for i, s in enumerate(sequences) if s in ended and s.status is not finished]
    return Settlement([sequences[i] for i in samples], [cast("int", ids[i]) for i in samples], samples, others)


def _end(roster: Roster, sequence: Sequence, token_id: int | None, sample: int) -> Settled:
    finish = _finish_of(sequence, token_id, token_id is None)
    roster.finish(sequence)
    return Settled(sequence, token_id, sample, range(0), token_id is None, finish)


def _settle_entry(roster: Roster, entry: Entry, token_id: int | None, sample: int, rows: range) -> Settled | None:
    sequence = entry.sequence
    sequence.in_flight -= 1
    sequence.in_flight_unsampled -= not entry.samples
    if sequence.status is Status.FINISHED:
        return None
    faulted = entry.samples and token_id is None
    if token_id is not None:
        sequence.awaits_branch = sequence.params.use_beam_search
        if not sequence.awaits_branch:
            sequence.token_ids.append(token_id)
    if sequence.epoch == entry.epoch:
        sequence.protected &= token_id is None
        sequence.num_computed = entry.start + entry.num_tokens
        _index(roster, sequence)
    finish = _finish_of(sequence, token_id, faulted)
    if finish is not None:
        roster.finish(sequence)
    return Settled(sequence, token_id, sample, rows, faulted, finish)


def _index(roster: Roster, sequence: Sequence) -> None:
    given_up = roster.kv.index(sequence.tables, sequence.token_ids, sequence.num_computed)
    if given_up is not None:
        sequence.decodes_until = 0  # the device must be told of the blocks adopted
        roster.give_up(given_up)


def _sampled_ids(result: StepResult) -> list[int | None]:
    """The ids, None where the logits held no usable value."""
    ids: list[int | None] = result.token_ids.tolist()
    if result.faulted.any():
        return [None if faulted else i for i, faulted in zip(ids, result.faulted.tolist(), strict=True)]
    return ids


def _finish_of(sequence: Sequence, token_id: int | None, faulted: bool) -> Finish | None:
    if faulted:
        return "error", None
    if token_id is not None:
        return None if sequence.awaits_branch else sequence.end_of(token_id)
    if sequence.max_output == 0 and sequence.num_computed == sequence.prompt_len:
        return "length", None
    return None
