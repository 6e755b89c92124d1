"""Step: one iteration's decision, as the device gets it and as the host remembers it until it settles.

Decoding rows are the bulk of most steps. One of them costs a step a few attributes when it is launched, a few when it
is settled, and no object of its own; its rare needs (a block, an end, an adopted block) are the scheduler's.
Read next: `engine/schedule/scheduler.py`, docs/performance.md (what a row costs).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.grammar.grammar import Grammar
from engine.plan import NO_TARGET, PLACEHOLDER, BlockCopy, BlockUpdate, Int32Array, RowState, SampleBatch, StepPlan
from engine.schedule.sequence import Sequence, Status

_ONE = np.int32(1)


class DecodeArrays(NamedTuple):
    """The decoding rows of a step as the plan has them. Arrays are shared between steps and never written.

    Attributes:
        rows, starts, num_tokens, token_ids, indices: [n]; `token_ids` are all PLACEHOLDER, `indices` count up.
        constrained: the sequences under a grammar, with their indices.
    """

    sequences: list[Sequence]
    rows: Int32Array
    starts: Int32Array
    num_tokens: Int32Array
    token_ids: Int32Array
    indices: Int32Array
    constrained: list[tuple[int, Sequence]]

    @classmethod
    def of(cls, sequences: list[Sequence]) -> "DecodeArrays":
        """Of sequences that have just been granted a token each."""
        n = len(sequences)
        return cls(
            sequences,
            np.array([s.row for s in sequences], np.int32),
            np.array([s.num_scheduled - 1 for s in sequences], np.int32),
            np.ones(n, np.int32),
            np.full(n, PLACEHOLDER, np.int32),
            np.arange(n, dtype=np.int32),
            [(i, s) for i, s in enumerate(sequences) if s.grammar is not None],
        )

    def next(self, sequences: list[Sequence]) -> "DecodeArrays":
        """Of the step after this one: mostly of the same sequences, which costs 3 us with 256 of them, where `of`
        takes 35. A sequence that decodes in two steps running is one position further."""
        if sequences != self.sequences:
            return DecodeArrays.of(sequences)
        starts = self.starts + _ONE
        return DecodeArrays(
            sequences, self.rows, starts, self.num_tokens, self.token_ids, self.indices, self.constrained
        )


class Entry(NamedTuple):
    """One row of a launched step that is not decoding. A choice that forks has no tokens and follows its
    parent's entry.

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
    """A decided step: in the plan, the decoding rows come first.

    Attributes:
        constrained: the sequences under a grammar that sample, with their indices in the batch.
    """

    plan: StepPlan
    batch: SampleBatch
    decoding: DecodeArrays
    entries: list[Entry]
    constrained: list[tuple[int, Sequence]]

    def grammars(self) -> list[tuple[int, Grammar]]:
        """Those of `constrained` that have not ended since the step was made."""
        return [(i, s.grammar) for i, s in self.constrained if s.grammar and s.status is not Status.FINISHED]


@dataclass(slots=True)
class Draft:
    """A step being put together.

    Attributes:
        budget: tokens left to grant.
        decoding: sequences granted the one token they decode.
        changed: those of them whose block tables the device may not know.
    """

    budget: int
    decoding: list[Sequence] = field(default_factory=list)
    changed: list[Sequence] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    new_rows: list[RowState] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nobody has been granted anything."""
        return not self.decoding and not self.entries

    def granted(self) -> set[Sequence]:
        """Who has been granted something."""
        return {*self.decoding, *(entry.sequence for entry in self.entries)}

    def make_step(self, number: int, before: DecodeArrays) -> Step:
        """The step as launched, after one that decoded `before`; marks the block tables as sent."""
        decoding = before.next(self.decoding)
        entries = [e for e in self.entries if e.num_tokens]
        changed = [*self.changed, *(e.sequence for e in self.entries)] if entries else self.changed
        plan = StepPlan(
            step=number,
            rows=_join(decoding.rows, [e.sequence.row for e in entries]),
            starts=_join(decoding.starts, [e.start for e in entries]),
            num_tokens=_join(decoding.num_tokens, [e.num_tokens for e in entries]),
            token_ids=_join(decoding.token_ids, [t for e in entries for t in _input_ids(e)]),
            prompt_targets=_target_ids(entries, len(decoding.sequences)) if entries else None,
            row_states=tuple(self.new_rows),
            block_updates=_block_updates(changed),
            block_copies=tuple(self.copies),
        )
        return Step(plan, self._make_batch(number, decoding), decoding, self.entries, self._constrained(decoding))

    def _make_batch(self, number: int, decoding: DecodeArrays) -> SampleBatch:
        indices, rows, index = list[int](), list[int](), len(decoding.sequences) - 1
        for entry in self.entries:
            index += entry.num_tokens > 0
            if entry.samples:
                indices.append(index)
                rows.append(entry.sequence.row)
        return SampleBatch(number, _join(decoding.indices, indices), _join(decoding.rows, rows))

    def _constrained(self, decoding: DecodeArrays) -> list[tuple[int, Sequence]]:
        sampling = [entry.sequence for entry in self.entries if entry.samples]
        if not any(s.grammar is not None for s in sampling):
            return decoding.constrained
        behind = enumerate(sampling, len(decoding.sequences))
        return decoding.constrained + [(i, s) for i, s in behind if s.grammar is not None]


def _join(head: Int32Array, tail: list[int]) -> Int32Array:
    return np.concatenate([head, np.array(tail, np.int32)]) if tail else head


def _input_ids(entry: Entry) -> list[int]:
    ids = entry.sequence.token_ids[entry.start : entry.start + entry.num_tokens]
    return ids if len(ids) == entry.num_tokens else [*ids, PLACEHOLDER]


def _target_ids(entries: list[Entry], num_decoding: int) -> Int32Array | None:
    if not any(e.targets for e in entries):
        return None
    ids = [
        e.sequence.token_ids[position + 1] if position in e.targets else NO_TARGET
        for e in entries
        for position in range(e.start, e.start + e.num_tokens)
    ]
    return np.array([NO_TARGET] * num_decoding + ids, np.int32)


def _block_updates(sequences: list[Sequence]) -> tuple[BlockUpdate, ...]:
    updates = []
    for sequence in sequences:
        for group, table in enumerate(sequence.tables):
            first, blocks = table.num_sent, table.blocks
            if first < len(blocks):
                updates.append(BlockUpdate(group, sequence.row, first, tuple(blocks[first:])))
                table.num_sent = len(blocks)
    return tuple(updates)
