"""Scheduler: which rows compute how many tokens in the next step, and what a settled step means.

Pure decisions over the state it owns: no I/O, no clock, no device. A running or waiting sequence
is granted `min(pending, budget)` tokens; decode, chunked prefill and prefix hits are that one
subtraction. Rules, in the order in which they apply:

    order       arrival; running sequences go first, then waiting ones
    preemption  a running sequence that needs a block takes it from one after it in the order:
                least computed work first, those preempted before only once they made progress,
                unless all are protected, then the last in the order. It skips the step instead
                when fenced blocks are coming or nothing comes after it.
    admission   needs a row and blocks for all known tokens. What does not fit is passed over, at
                most `MAX_PASSED_OVER` times; then nothing overtakes it.
    fence       rows and blocks freed while steps are in flight wait for the last of them.

Read next: `engine/kv/manager.py` (blocks), `engine/loop.py` (who calls this).
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.kv.fence import Fence, Fenced
from engine.kv.manager import KVManager, Lease
from engine.kv.prefix import Entry as KVEntry
from engine.plan import (
    NO_TARGET,
    PLACEHOLDER,
    BlockUpdate,
    Int32Array,
    RowState,
    SampleBatch,
    StepPlan,
    StepResult,
)
from engine.request import FinishReason
from engine.sequence import Sequence, Status

MAX_PASSED_OVER = 16
MAX_ADMISSION_FAILURES = 8
"""Waiting sequences that may fail to fit in one step before the scheduler stops looking."""


class Entry(NamedTuple):
    """One row of a launched step.

    Attributes:
        start: position of the first token.
        epoch: the sequence's epoch at launch; it differs at settle if it was preempted since.
        targets: prompt positions whose logprobs the step reports, as a half-open range.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    epoch: int
    samples: bool
    targets: range


class Step(NamedTuple):
    """A decided step: what the device runs and what the host must remember until it settles."""

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
    finish: tuple[FinishReason, int | str | None] | None


@dataclass(slots=True)
class _Draft:
    """A step being put together."""

    budget: int
    entries: list[Entry] = field(default_factory=list)
    new_rows: list[RowState] = field(default_factory=list)


class Scheduler:
    """Owns the sequences, the rows, the fence and the KV manager."""

    def __init__(
        self, kv: KVManager, *, max_num_seqs: int, max_num_batched_tokens: int, enable_chunked_prefill: bool
    ) -> None:
        self.kv = kv
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.fence = Fence()
        self.num_preemptions = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enable_chunked_prefill = enable_chunked_prefill
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrived = 0
        self._last_launched = 0
        self._last_settled = 0

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not self.running and not self.waiting and self._last_launched == self._last_settled

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Admission at the door made sure that it can fit alone."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, in whatever state it is; harmless when it is finished already."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._vacate(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    # -- schedule ---------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Decide the next step; None when nothing can run."""
        draft = _Draft(self._max_num_batched_tokens)
        self._grant_running(draft)
        self._admit_waiting(draft)
        return self._launch(draft) if draft.entries else None

    def _grant_running(self, draft: _Draft) -> None:
        for sequence in self.running.copy():
            if sequence.status is not Status.RUNNING:
                continue  # preempted a moment ago by one before it
            num_tokens = min(sequence.pending, draft.budget)
            if num_tokens and self._make_room(sequence, sequence.num_scheduled + num_tokens):
                self._grant(draft, sequence, num_tokens)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the tables to `num_tokens`, preempting later ones if need be; False is "skip this step"."""
        while not self.kv.grow(sequence.tables, num_tokens):
            if self.fence:
                return False
            victim = self._victim(sequence)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _victim(self, beneficiary: Sequence) -> Sequence | None:
        after = [s for s in self.running if _order(s) > _order(beneficiary)]
        unprotected = [s for s in after if not s.protected]
        if unprotected:
            return min(unprotected, key=lambda s: (s.num_scheduled, -s.arrival))
        return after[-1] if after else None

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._vacate(sequence)
        sequence.status = Status.WAITING
        sequence.num_scheduled = sequence.num_computed = 0
        sequence.epoch += 1
        sequence.protected = True
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def _vacate(self, sequence: Sequence) -> None:
        self._free(Fenced(self.kv.detach(sequence.tables), sequence.row))
        sequence.tables = []
        sequence.row = -1

    def _free(self, fenced: Fenced) -> None:
        if self._last_launched > self._last_settled:
            self.fence.hold(self._last_launched, fenced)
        else:
            self._release(fenced)

    def _release(self, fenced: Fenced) -> None:
        self.kv.release(fenced.blocks)
        if fenced.row is not None:
            self._free_rows.append(fenced.row)

    def _admit_waiting(self, draft: _Draft) -> None:
        passed_over: list[Sequence] = []
        for sequence in self.waiting.copy():
            if not self._free_rows or not draft.budget or len(passed_over) >= MAX_ADMISSION_FAILURES:
                break
            if self._admit(draft, sequence):
                for overtaken in passed_over:
                    overtaken.num_passed_over += 1
            else:
                passed_over.append(sequence)
                if sequence.num_passed_over >= MAX_PASSED_OVER:
                    break

    def _admit(self, draft: _Draft, sequence: Sequence) -> bool:
        if sequence.in_flight:
            return False
        runs = self._match(sequence)
        num_cached = len(runs[0]) * self.kv.block_size
        if not self._enable_chunked_prefill and sequence.known - num_cached > draft.budget:
            return False
        tables = self.kv.begin(runs, sequence.known, sequence.cache_root)
        if tables is None:
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)
        sequence.status = Status.RUNNING
        sequence.tables = tables
        sequence.row = self._free_rows.pop()
        sequence.num_scheduled = sequence.num_computed = num_cached
        if sequence.epoch == 0:
            sequence.num_cached_tokens = num_cached
        draft.new_rows.append(sequence.row_state())
        self._grant(draft, sequence, min(sequence.pending, draft.budget))
        return True

    def _match(self, sequence: Sequence) -> list[list[KVEntry]]:
        """Cached blocks to start from; none when prompt logprobs need every position computed."""
        if sequence.params.prompt_logprobs is not None:
            return [[] for _ in self.kv.groups]
        return self.kv.match(sequence.token_ids, sequence.cache_root)

    def _grant(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_scheduled
        sequence.num_scheduled += num_tokens
        sequence.in_flight += 1
        samples = sequence.num_scheduled == sequence.known and sequence.max_output > 0
        sequence.num_placeholders += samples
        draft.budget -= num_tokens
        targets = self._prompt_targets(sequence, start)
        draft.entries.append(Entry(sequence, start, num_tokens, sequence.epoch, samples, targets))

    def _prompt_targets(self, sequence: Sequence, start: int) -> range:
        if sequence.params.prompt_logprobs is None:
            return range(0)
        first = max(start, sequence.num_prompt_logprobs_launched)
        stop = min(sequence.num_scheduled, sequence.prompt_len - 1)
        sequence.num_prompt_logprobs_launched = max(first, stop)
        return range(first, max(first, stop))

    def _launch(self, draft: _Draft) -> Step:
        self._last_launched += 1
        entries = draft.entries
        plan = StepPlan(
            step=self._last_launched,
            rows=np.array([e.sequence.row for e in entries], np.int32),
            starts=np.array([e.start for e in entries], np.int32),
            num_tokens=np.array([e.num_tokens for e in entries], np.int32),
            token_ids=np.array([t for e in entries for t in _input_ids(e)], np.int32),
            prompt_targets=_target_ids(entries),
            row_states=tuple(draft.new_rows),
            block_updates=tuple(update for e in entries for update in _block_updates(e.sequence)),
        )
        sampling = np.array([i for i, e in enumerate(entries) if e.samples], np.int32)
        return Step(plan, SampleBatch(self._last_launched, sampling), entries)

    # -- settle -----------------------------------------------------------------------------

    def settle(self, step: Step, result: StepResult) -> list[Settled]:
        """Take in the result of the oldest step in flight; ends sequences and opens the fence."""
        self._open_fence(result.step)
        settled = []
        sample = target = 0
        for entry in step.entries:
            rows = range(target, target + len(entry.targets))
            settled_entry = self._settle_entry(entry, result, sample, rows)
            if settled_entry is not None:
                settled.append(settled_entry)
            sample += entry.samples
            target = rows.stop
        return settled

    def abandon(self, step: Step) -> list[Sequence]:
        """Give up the oldest step in flight, which failed; ends and returns the sequences in it."""
        self._open_fence(step.plan.step)
        ended = []
        for entry in step.entries:
            entry.sequence.in_flight -= 1
            entry.sequence.num_placeholders -= entry.samples
            if entry.sequence.status is not Status.FINISHED:
                self.finish(entry.sequence)
                ended.append(entry.sequence)
        return ended

    def _open_fence(self, step: int) -> None:
        if step != self._last_settled + 1:
            raise ValueError(f"step {step} settles after step {self._last_settled}")
        self._last_settled = step
        for fenced in self.fence.settle(step):
            self._release(fenced)

    def _settle_entry(self, entry: Entry, result: StepResult, sample: int, rows: range) -> Settled | None:
        sequence = entry.sequence
        sequence.in_flight -= 1
        sequence.num_placeholders -= entry.samples
        if sequence.status is Status.FINISHED:
            return None
        token_id, faulted = None, False
        if entry.samples:
            token_id, faulted = int(result.token_ids[sample]), bool(result.faulted[sample])
            if not faulted:
                sequence.token_ids.append(token_id)
        if sequence.epoch == entry.epoch:
            sequence.protected &= token_id is None
            self._advance(sequence, entry.start + entry.num_tokens)
        finish = self._finish_of(sequence, token_id, faulted)
        if finish is not None:
            self.finish(sequence)
        return Settled(sequence, token_id, sample, rows, faulted, finish)

    def _advance(self, sequence: Sequence, num_computed: int) -> None:
        sequence.num_computed = num_computed
        given_up = self.kv.index(sequence.tables, sequence.token_ids, num_computed)
        if given_up is not None:
            self._free(Fenced(given_up, None))

    def _finish_of(
        self, sequence: Sequence, token_id: int | None, faulted: bool
    ) -> tuple[FinishReason, int | str | None] | None:
        if faulted:
            return "error", None
        if token_id is not None:
            return sequence.end_of(token_id)
        if sequence.max_output == 0 and sequence.num_computed == sequence.prompt_len:
            return "length", None
        return None

    # -- inspection -------------------------------------------------------------------------

    def leases(self) -> Iterator[Lease]:
        """Every lease on blocks that exists."""
        for sequence in self.running:
            yield tuple(tuple(table.blocks) for table in sequence.tables)
        for fenced in self.fence:
            yield fenced.blocks

    def audit(self) -> list[str]:
        """Check blocks and rows against their holders; returns what is wrong, [] if nothing."""
        problems = self.kv.audit(self.leases())
        held = [s.row for s in self.running] + [f.row for f in self.fence if f.row is not None]
        if len(set(held) | set(self._free_rows)) != len(held) + len(self._free_rows):
            problems.append(f"rows: {sorted(held)} are held while {sorted(self._free_rows)} are free")
        if self.is_idle and (len(self.fence) or held):
            problems.append(f"idle with {len(self.fence)} fenced leases and rows {held}")
        return problems


def _order(sequence: Sequence) -> int:
    return sequence.arrival


def _input_ids(entry: Entry) -> list[int]:
    sequence, stop = entry.sequence, entry.start + entry.num_tokens
    ids = sequence.token_ids[entry.start : stop]
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
