"""Scheduler: which rows compute how many tokens in the next step.

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

Read next: `engine/roster.py` (who waits and who runs), `engine/settlement.py` (what becomes of a step),
`engine/kv/manager.py` (blocks), `engine/step.py`, `engine/loop.py` (who calls this).
"""

from collections.abc import Iterator
from enum import Enum, auto

from engine.decoding import DecodeArrays
from engine.kv.manager import KVManager
from engine.kv.prefix import Entry as CachedBlock
from engine.plan import StepResult
from engine.roster import Roster
from engine.sequence import Sequence, Status
from engine.settlement import Branch, Settlement, Settler
from engine.step import Draft, Entry, Step

MAX_PASSED_OVER = 16
MAX_ADMISSION_FAILURES = 8
"""Waiting sequences that may fail to fit in one step before the scheduler stops looking."""


class Admission(Enum):
    """What came of trying to admit a waiting sequence.

    NOT_READY: its last tokens are in flight, or the block it needs next is being computed.
    """

    ADMITTED = auto()
    NOT_READY = auto()
    NO_ROOM = auto()


class Scheduler:
    """Owns the roster of sequences and, through its holdings, the rows, the fence and the KV manager.

    Attributes:
        running: sequences with a row, sorted by `fixed_rank`.
    """

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
        self._roster = Roster(kv, max_num_seqs)
        self._settler = Settler(self._roster, kv)
        self._holdings = self._roster.holdings
        self._order = self._roster.order
        self.running = self._roster.running
        self.fence = self._holdings.fence
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enable_chunked_prefill = enable_chunked_prefill
        self._chunk_limit = long_prefill_token_threshold or max_num_batched_tokens
        self._decoding = DecodeArrays.of([])
        self._free_rows = self._holdings.free_rows

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Admission at the door made sure that it can fit alone."""
        self._roster.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, in whatever state it is; harmless when it is finished already."""
        self._roster.finish(sequence)

    def settle(self, step: Step, result: StepResult) -> Settlement:
        """Take in the result of the oldest step in flight; ends sequences and opens the fence."""
        return self._settler.settle(step, result)

    def abandon(self, step: Step) -> list[Sequence]:
        """Give up the oldest step in flight, which failed; ends and returns the sequences in it."""
        return self._settler.abandon(step)

    def branch(self, branches: list[Branch]) -> None:
        """Give every beam its next tokens and the blocks of the beam it continues."""
        self._settler.branch(branches)

    # -- schedule ---------------------------------------------------------------------------

    def awaits_blocks(self) -> bool:
        """Whether the first in line waits for blocks that steps in flight compute, and the next step has room for it.

        If so it is worth settling them first, though nothing is computed while the next step is put together.
        """
        if not (self.num_waiting and self._free_rows):
            return False
        if sum(s.pending for s in self.running) >= self._max_num_batched_tokens:
            return False
        head = next(self.waiting())
        num_cached = len(self._match(head)[0]) * self.kv.block_size
        stop = num_cached + self.kv.block_size
        return any(s.num_scheduled >= stop for s in self._computing(head, num_cached))

    def schedule(self) -> Step | None:
        """Decide the next step; None when nothing can run."""
        draft = Draft(self._max_num_batched_tokens)
        self._serve_entitled(draft)
        self._grant_running(draft)
        if self.num_waiting:
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
        head = next(self.waiting(), None) if self.num_waiting and self.running else None
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
                self._roster.preempt(victim)

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
                self._roster.preempt(beam)
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
            self._roster.preempt(victim)
        draft.copies += copies
        return True

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
        if self._computing(sequence, num_cached):
            return Admission.NOT_READY
        if not self._enable_chunked_prefill and sequence.known - num_cached > budget:
            return Admission.NO_ROOM
        tables = self.kv.begin(runs, sequence.known, sequence.cache_root)
        if tables is None:
            return Admission.NO_ROOM
        self._roster.start(sequence)
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

    def _computing(self, sequence: Sequence, num_cached: int) -> list[Sequence]:
        """Running sequences that are about to complete the block after the cached ones."""
        stop = num_cached + self.kv.block_size
        if not self.kv.enable_prefix_caching or sequence.params.prompt_logprobs is not None or sequence.known <= stop:
            return []
        wanted = sequence.token_ids[:stop]
        return [
            s
            for s in self.running
            if s.num_computed < stop <= len(s.token_ids)
            and s.cache_root == sequence.cache_root
            and s.token_ids[:stop] == wanted
        ]

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
                choice.num_scheduled = choice.num_computed = sequence.num_scheduled
                choice.num_cached_tokens = sequence.num_cached_tokens
                self._roster.start(choice)
                draft.new_rows.append(choice.row_state())
                self._enter(draft, choice, sequence.num_scheduled, 0, True)
        if sequence.fork_rows:
            self._free_rows.extend(sequence.fork_rows)  # of choices that were aborted before they began
            sequence.fork_rows = []
        sequence.forks = ()

    def _prompt_targets(self, sequence: Sequence, start: int) -> range:
        if sequence.params.prompt_logprobs is None:
            return range(0)
        first = max(start, sequence.num_prompt_logprobs_launched)
        stop = max(first, min(sequence.num_scheduled, sequence.prompt_len - 1))
        sequence.num_prompt_logprobs_launched = stop
        return range(first, stop)

    # -- inspection -------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, new or preempted."""
        return self._roster.num_waiting

    @property
    def num_preemptions(self) -> int:
        """How often a sequence lost its row and blocks."""
        return self._roster.num_preemptions

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return self._roster.is_idle

    @property
    def kv_fill(self) -> float:
        """Share of the slots in used blocks that hold tokens; 1 when none is used."""
        return self._roster.holdings.fill(self.running)

    def waiting(self) -> Iterator[Sequence]:
        """Waiting sequences, in order."""
        return self._roster.waiting()

    def waiting_by_tenant(self) -> dict[str, int]:
        """`num_waiting` of each tenant that has any."""
        return self._roster.waiting_by_tenant()

    def audit(self) -> list[str]:
        """Check blocks and rows against their holders; returns what is wrong, [] if nothing."""
        return self._roster.audit()
