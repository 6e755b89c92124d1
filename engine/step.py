"""Step: one iteration's decision, as the device gets it and as the host remembers it until it settles."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.plan import NO_TARGET, PLACEHOLDER, BlockCopy, BlockUpdate, Int32Array, RowState, SampleBatch, StepPlan
from engine.sequence import Finish, Sequence


class Entry(NamedTuple):
    """One row of a launched step; a choice that forks has no tokens and follows its parent's entry.

    Attributes:
        start: position of the first token.
        epoch: the sequence's epoch at launch; it differs at settle if it was preempted since.
        targets: prompt positions whose logprobs the step reports.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    epoch: int
    samples: bool
    targets: range


class Step(NamedTuple):
    """A decided step."""

    plan: StepPlan
    batch: SampleBatch
    entries: list[Entry]


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


@dataclass(slots=True)
class Draft:
    """A step being put together; `budget` is the tokens left to grant."""

    budget: int
    entries: list[Entry] = field(default_factory=list)
    new_rows: list[RowState] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    def make_step(self, number: int) -> Step:
        """The step as launched; marks the block tables as sent."""
        entries = [e for e in self.entries if e.num_tokens]
        plan = StepPlan(
            step=number,
            rows=np.array([e.sequence.row for e in entries], np.int32),
            starts=np.array([e.start for e in entries], np.int32),
            num_tokens=np.array([e.num_tokens for e in entries], np.int32),
            token_ids=np.array([t for e in entries for t in _input_ids(e)], np.int32),
            prompt_targets=_target_ids(entries),
            row_states=tuple(self.new_rows),
            block_updates=tuple(update for e in self.entries for update in _block_updates(e.sequence)),
            block_copies=tuple(self.copies),
        )
        return Step(plan, self._make_batch(number), self.entries)

    def _make_batch(self, number: int) -> SampleBatch:
        indices, rows, index = [], [], -1
        for entry in self.entries:
            index += entry.num_tokens > 0
            if entry.samples:
                indices.append(index)
                rows.append(entry.sequence.row)
        return SampleBatch(number, np.array(indices, np.int32), np.array(rows, np.int32))


def _input_ids(entry: Entry) -> list[int]:
    ids = entry.sequence.token_ids[entry.start : entry.start + entry.num_tokens]
    return ids if len(ids) == entry.num_tokens else [*ids, PLACEHOLDER]


def _target_ids(entries: list[Entry]) -> Int32Array | None:
    if not any(e.targets for e in entries):
        return None
    ids = [
        e.sequence.token_ids[position + 1] if position in e.targets else NO_TARGET
        for e in entries
        for position in range(e.start, e.start + e.num_tokens)
    ]
    return np.array(ids, np.int32)


def _block_updates(sequence: Sequence) -> Iterator[BlockUpdate]:
    for group, table in enumerate(sequence.tables):
        if table.num_sent < len(table.blocks):
            yield BlockUpdate(group, sequence.row, table.num_sent, tuple(table.blocks[table.num_sent :]))
            table.num_sent = len(table.blocks)
