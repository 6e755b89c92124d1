"""Scheduler: which rows compute how many tokens in the next step, and what a settled step means.

Pure decisions over the state it owns: no I/O, no clock, no device. A running or waiting sequence
is granted `min(pending, budget)` tokens; decode, chunked prefill and prefix hits are that one
subtraction. The rules are written out in docs/scheduling.md; in short:

    order       priority, then the tenant served least, then arrival; running sequences go first,
                except that a waiting one may take from running ones of lower priority, or of a
                tenant above its share if its own is below.
    preemption  a running sequence that needs a block takes it from one after it in the order:
                least computed work first, those preempted before only once they made progress,
                unless all are protected, then the last in the order. It skips the step instead
                when fenced blocks are coming or nothing comes after it.
    admission   needs a row per choice and blocks for all known tokens. What does not fit is passed
                over, at most `MAX_PASSED_OVER` times; then nothing overtakes it. One whose next
                block a running sequence is computing waits for that block.
    fork        the choices of a request part where its prompt ends; they share its blocks, and
                whoever writes to a shared block copies it first.
    fence       rows and blocks freed while steps are in flight wait for the last of them.

Read next: `engine/kv/manager.py` (blocks), `engine/step.py`, `engine/loop.py` (who calls this).
"""

from bisect import insort
from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

from engine.decoding import DecodeArrays, Token
from engine.holdings import Holdings
from engine.kv.fence import Fenced
from engine.kv.manager import KVManager
from engine.kv.prefix import Entry as CachedBlock
from engine.order import Order, fixed_rank
from engine.plan import StepResult
from engine.sequence import Finish, Sequence, Status
from engine.step import Draft, Entry, Settled, Settlement, Step

MAX_PASSED_OVER = 16
MAX_ADMISSION_FAILURES = 8
"""Waiting sequences that may fail to fit in one step before the scheduler stops looking."""


class Branch(NamedTuple):
    """A beam's next state: `target` goes on as `source` does, with these tokens."""

    target: Sequence
    source: Sequence
    token_ids: list[int]


class Admission(Enum):
    """What came of trying to admit a waiting sequence.

    NOT_READY: its last tokens are in flight, or the block it needs next is being computed.
    """

    ADMITTED = auto()
    NOT_READY = auto()
    NO_ROOM = auto()


class Scheduler:
    """Owns the sequences and, through its holdings, the rows, the fence and the KV manager."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.kv = kv
        self.running: list[Sequence] = []
        self._holdings = Holdings(kv, max_num_seqs)
        self.fence = self._holdings.fence
        self.num_preemptions = 0
        self._waiting: dict[str, list[Sequence]] = {}
        self._order = Order(max_num_seqs)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enable_chunked_prefill = enable_chunked_prefill
        self._chunk_limit = long_prefill_token_threshold or max_num_batched_tokens
        self._decoding = DecodeArrays.of([])
        self._free_rows = self._holdings.free_rows
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, new or preempted."""
        return sum(map(len, self._waiting.values()))

    def waiting_by_tenant(self) -> dict[str, int]:
        """`num_waiting` of each tenant that has any."""
        return {tenant: len(queue) for tenant, queue in self._waiting.items()}

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not self.running and not self.num_waiting and not self._holdings.has_steps_in_flight

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Admission at the door made sure that it can fit alone."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        for choice in (sequence, *sequence.forks):
            choice.arrival = sequence.arrival
            self._order.fairness.arrive(choice.tenant)
        self._enqueue(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, in whatever state it is; harmless when it is finished already."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._holdings.vacate(sequence)
        elif sequence.status is Status.WAITING:
            self._dequeue(sequence)
        sequence.status = Status.FINISHED
        self._order.fairness.leave(sequence.tenant)

    # -- queues -----------------------------------------------------------------------------

    def waiting(self) -> Iterator[Sequence]:
        """Waiting sequences, in order."""
        return self._order.merged(self._waiting.values())

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting.setdefault(sequence.tenant, []), sequence, key=fixed_rank)
        sequence.status = Status.WAITING

    def _dequeue(self, sequence: Sequence) -> None:
        queue = self._waiting[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._waiting[sequence.tenant]

    # -- schedule ---------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Decide the next step; None when nothing can run."""
        draft = Draft(self._max_num_batched_tokens)
        self._serve_entitled(draft)
        self._grant_running(draft)
        if self._waiting:
            self._admit_waiting(draft)
        if draft.is_empty and not self._holdings.has_steps_in_flight:
            self._take_from_beams(draft)
        if draft.is_empty:
            return None
        step = draft.make_step(self._holdings.launch(), self._decoding)
        self._decoding = step.decoding
        return step

    def _serve_entitled(self, draft: Draft) -> None:
        """Admit the first waiting sequence ahead of the running ones, leaving each of these a token, if it
        comes before some of another tenant or priority. If it has no room, preempt those that it may."""
        head = next(self.waiting(), None) if self._waiting and self.running else None
        if head is None or not any(self._order.comes_before(head, s) for s in self.running):
            return
        if self._admit(draft, head, draft.budget - len(self.running)) is Admission.NO_ROOM and not self.fence:
            self._preempt_for(head)

    def _preempt_for(self, head: Sequence) -> None:
        """Make room for a waiting sequence, if preempting those that it may preempt is enough."""
        needed, chosen = self.kv.blocks_for(head.known), list[Sequence]()

        def is_enough() -> bool:
            blocks = self.kv.num_available + self.kv.num_freed_with([victim.tables for victim in chosen])
            return len(self._free_rows) + len(chosen) > len(head.forks) and blocks >= needed

        for victim in self._order.preemptible_for(head, self.running):
            if is_enough():
                break
            chosen.append(victim)
        if is_enough():
            for victim in chosen:
                self._preempt(victim)

    def _grant_running(self, draft: Draft) -> None:
        order = self._order.sorted(self.running)
        granted = draft.granted()
        decoding, budget = draft.decoding, draft.budget
        for place, sequence in enumerate(order):
            start = sequence.num_scheduled
            if start >= sequence.decodes_until or granted:
                draft.budget = budget
                self._grant_with_care(draft, order, place, granted)
                budget = draft.budget
            elif budget:
                budget -= 1
                sequence.num_scheduled = start + 1
                sequence.in_flight += 1
                decoding.append(sequence)
        draft.budget = budget
        self._order.charge_outputs(decoding)

    def _grant_with_care(self, draft: Draft, order: list[Sequence], place: int, granted: set[Sequence]) -> None:
        """Grant tokens to `order[place]`, which may need blocks, a copy or more than one token."""
        sequence = order[place]
        if sequence.status is not Status.RUNNING or sequence in granted:
            return  # preempted a moment ago by one before it, or admitted just now
        num_tokens = min(sequence.pending, draft.budget, self._chunk_limit)
        if not num_tokens or not self._make_room(draft, order, place, num_tokens):
            return
        if not sequence.is_decoding:
            self._grant(draft, sequence, num_tokens)
            return
        room = len(sequence.tables[0].blocks) * self.kv.block_size
        sequence.decodes_until = min(room, sequence.max_len - 1)
        sequence.num_scheduled += 1
        sequence.in_flight += 1
        draft.budget -= 1
        draft.decoding.append(sequence)
        draft.changed.append(sequence)

    def _take_from_beams(self, draft: Draft) -> None:
        """Nothing can run and nothing is in flight: beams that wait for a preempted sibling hold what others
        need. They have their candidates already, so they lose only work; the last in the order goes first."""
        for beam in reversed(self._order.sorted(self.running)):
            if not draft.is_empty:
                break
            if beam.awaits_branch:
                self._preempt(beam)
                self._grant_running(draft)
                self._admit_waiting(draft)

    def _make_room(self, draft: Draft, order: list[Sequence], place: int, num_tokens: int) -> bool:
        """Extend the tables of `order[place]`, preempting later ones if need be; False is "skip this step"."""
        sequence = order[place]
        stop = sequence.num_scheduled + num_tokens
        while (copies := self.kv.grow(sequence.tables, stop, write_from=sequence.num_scheduled)) is None:
            granted = draft.granted()
            later = (s for s in order[place + 1 :] if s not in granted)
            victim = None if self.fence else self._order.victim_among(later)
            if victim is None:
                return False
            self._preempt(victim)
        draft.copies += copies
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._holdings.vacate(sequence)
        sequence.num_scheduled = sequence.num_computed = 0
        sequence.epoch += 1
        sequence.protected = True
        self.num_preemptions += 1
        self._enqueue(sequence)

    # -- admission --------------------------------------------------------------------------

    def _admit_waiting(self, draft: Draft) -> None:
        passed_over: list[Sequence] = []
        for sequence in self.waiting():
            if not self._free_rows or not draft.budget or len(passed_over) >= MAX_ADMISSION_FAILURES:
                break
            admission = self._admit(draft, sequence, draft.budget)
            if admission is Admission.ADMITTED:
                for overtaken in passed_over:
                    overtaken.num_passed_over += 1
            elif admission is Admission.NO_ROOM:
                passed_over.append(sequence)
                if sequence.num_passed_over >= MAX_PASSED_OVER:
                    break

    def _admit(self, draft: Draft, sequence: Sequence, budget: int) -> Admission:
        if sequence.in_flight or sequence.awaits_branch:
            return Admission.NOT_READY
        forks = [s for s in sequence.forks if s.status is Status.PENDING]
        if budget < 1 or len(self._free_rows) <= len(forks):
            return Admission.NO_ROOM
        runs = self._match(sequence)
        num_cached = len(runs[0]) * self.kv.block_size
        if self._is_being_computed(sequence, num_cached):
            return Admission.NOT_READY
        if not self._enable_chunked_prefill and sequence.known - num_cached > budget:
            return Admission.NO_ROOM
        tables = self.kv.begin(runs, sequence.known, sequence.cache_root)
        if tables is None:
            return Admission.NO_ROOM
        self._dequeue(sequence)
        insort(self.running, sequence, key=fixed_rank)
        sequence.status = Status.RUNNING
        sequence.tables = tables
        sequence.row = self._free_rows.pop()
        sequence.fork_rows = [self._free_rows.pop() for _ in forks]
        sequence.num_scheduled = sequence.num_computed = num_cached
        if sequence.epoch == 0:
            sequence.num_cached_tokens = num_cached
        draft.new_rows.append(sequence.row_state())
        self._grant(draft, sequence, min(sequence.pending, budget, self._chunk_limit))
        return Admission.ADMITTED

    def _match(self, sequence: Sequence) -> list[list[CachedBlock]]:
        """Cached blocks to start from; none when prompt logprobs need every position computed."""
        if sequence.params.prompt_logprobs is not None:
            return [[] for _ in self.kv.groups]
        return self.kv.match(sequence.token_ids, sequence.cache_root)

    def _is_being_computed(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether a running sequence is about to complete the block after the cached ones."""
        stop = num_cached + self.kv.block_size
        if not self.kv.enable_prefix_caching or sequence.params.prompt_logprobs is not None or sequence.known <= stop:
            return False
        wanted = sequence.token_ids[:stop]
        return any(
            s.num_computed < stop <= len(s.token_ids)
            and s.cache_root == sequence.cache_root
            and s.token_ids[:stop] == wanted
            for s in self.running
        )

    # -- grant ------------------------------------------------------------------------------

    def _grant(self, draft: Draft, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_scheduled
        sequence.num_scheduled += num_tokens
        if sequence.epoch == 0 and start < sequence.prompt_len:
            self._order.fairness.charge(sequence.tenant, num_tokens, 0)
        samples = sequence.num_scheduled == sequence.known and sequence.max_output > 0
        self._enter(draft, sequence, start, num_tokens, samples)
        draft.budget -= num_tokens
        if samples:
            self._fork(draft, sequence)

    def _enter(self, draft: Draft, sequence: Sequence, start: int, num_tokens: int, samples: bool) -> None:
        sequence.in_flight += 1
        sequence.in_flight_unsampled += not samples
        if samples:
            sequence.is_decoding = not sequence.params.use_beam_search
            self._order.fairness.charge(sequence.tenant, 0, 1)
        targets = self._prompt_targets(sequence, start)
        draft.entries.append(Entry(sequence, start, num_tokens, sequence.epoch, samples, targets))

    def _fork(self, draft: Draft, sequence: Sequence) -> None:
        """Start the other choices, which sample their first token from the same logits."""
        for choice in sequence.forks:
            if choice.status is Status.PENDING:
                choice.row = sequence.fork_rows.pop()
                choice.tables = self.kv.fork(sequence.tables)
                choice.status = Status.RUNNING
                choice.num_scheduled = choice.num_computed = sequence.num_scheduled
                choice.num_cached_tokens = sequence.num_cached_tokens
                insort(self.running, choice, key=fixed_rank)
                draft.new_rows.append(choice.row_state())
                self._enter(draft, choice, sequence.num_scheduled, 0, True)
        if sequence.fork_rows:
            # Choices that were aborted before they began.
            self._free_rows.extend(sequence.fork_rows)
            sequence.fork_rows = []
        sequence.forks = ()

    def _prompt_targets(self, sequence: Sequence, start: int) -> range:
        if sequence.params.prompt_logprobs is None:
            return range(0)
        first = max(start, sequence.num_prompt_logprobs_launched)
        stop = max(first, min(sequence.num_scheduled, sequence.prompt_len - 1))
        sequence.num_prompt_logprobs_launched = stop
        return range(first, stop)

    # -- settle -----------------------------------------------------------------------------

    def settle(self, step: Step, result: StepResult) -> Settlement:
        """Take in the result of the oldest step in flight; ends sequences and opens the fence."""
        self._holdings.settle(result.step)
        ids = _sampled_ids(result)
        settlement = self._settle_decoding(step.decoding.sequences, ids)
        sample, target = len(step.decoding.sequences), 0
        for entry in step.entries:
            rows = range(target, target + len(entry.targets))
            settled = self._settle_entry(entry, ids[sample] if entry.samples else None, sample, rows)
            if settled is not None:
                settlement.others.append(settled)
            sample += entry.samples
            target = rows.stop
        return settlement

    def _settle_decoding(self, sequences: list[Sequence], ids: list[int | None]) -> Settlement:
        """Rows that decoded. One that was preempted since has computed nothing any more, but has its token."""
        tokens, others = list[Token](), list[Settled]()
        running, finished, block_size = Status.RUNNING, Status.FINISHED, self.kv.block_size
        for sample, sequence in enumerate(sequences):
            sequence.in_flight -= 1
            if sequence.status is running:
                sequence.protected = False
                sequence.num_computed = computed = sequence.num_computed + 1
                if not computed % block_size:
                    self._index(sequence)
            elif sequence.status is finished:
                continue
            token_id, token_ids = ids[sample], sequence.token_ids
            if token_id is not None:
                token_ids.append(token_id)
                if token_id not in sequence.stopping_ids and len(token_ids) < sequence.max_len:
                    tokens.append((sequence, token_id, sample))
                    continue
            finish = _finish_of(sequence, token_id, token_id is None)
            self.finish(sequence)
            others.append(Settled(sequence, token_id, sample, range(0), token_id is None, finish))
        return Settlement(tokens, others)

    def abandon(self, step: Step) -> list[Sequence]:
        """Give up the oldest step in flight, which failed; ends and returns the sequences in it."""
        self._holdings.settle(step.plan.step)
        launched = [(s, True) for s in step.decoding.sequences] + [(e.sequence, e.samples) for e in step.entries]
        ended = []
        for sequence, samples in launched:
            sequence.in_flight -= 1
            sequence.in_flight_unsampled -= not samples
            if sequence.status is not Status.FINISHED:
                self.finish(sequence)
                ended.append(sequence)
        return ended

    def _settle_entry(self, entry: Entry, token_id: int | None, sample: int, rows: range) -> Settled | None:
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
            self._index(sequence)
        finish = _finish_of(sequence, token_id, faulted)
        if finish is not None:
            self.finish(sequence)
        return Settled(sequence, token_id, sample, rows, faulted, finish)

    def _index(self, sequence: Sequence) -> None:
        given_up = self.kv.index(sequence.tables, sequence.token_ids, sequence.num_computed)
        if given_up is not None:
            sequence.decodes_until = 0  # the device must be told of the blocks adopted
            self._holdings.free(Fenced(given_up, ()))

    def branch(self, branches: list[Branch]) -> None:
        """Give every beam its next tokens and the blocks of the beam it continues.

        No beam is in flight. One that was preempted, or whose source was, computes its tokens again.
        """
        moves = [
            (b.target, self.kv.fork(b.source.tables), b.source.num_scheduled)
            for b in branches
            if b.target is not b.source and b.target.tables and b.source.tables
        ]
        lost = [b.target for b in branches if b.target.tables and not b.source.tables]
        for target, _, token_ids in branches:
            target.awaits_branch = False
            target.token_ids = token_ids
        for target in lost:
            self._preempt(target)
        for target, tables, num_scheduled in moves:
            self._holdings.free(Fenced(self.kv.detach(target.tables), ()))
            target.tables = tables
            target.num_scheduled = target.num_computed = num_scheduled

    # -- inspection -------------------------------------------------------------------------

    @property
    def kv_fill(self) -> float:
        """Share of the slots in used blocks that hold tokens; 1 when none is used."""
        return self._holdings.fill(self.running)

    def audit(self) -> list[str]:
        """Check blocks and rows against their holders; returns what is wrong, [] if nothing."""
        problems = self._holdings.audit(self.running)
        if self.is_idle and len(self.fence):
            problems.append(f"idle with {len(self.fence)} fenced leases")
        return problems


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
