"""Step: one iteration's decision, as the device gets it and as the host remembers it until it settles."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.decoding import DecodeArrays
from engine.plan import NO_TARGET, PLACEHOLDER, BlockCopy, BlockUpdate, Int32Array, RowState, SampleBatch, StepPlan
from engine.sequence import Sequence


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
