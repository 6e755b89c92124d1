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

Read next: `engine/schedule/roster.py` (who waits and who runs), `engine/schedule/settle.py` (what becomes of a step),
`engine/kv/manager.py` (blocks), `engine/schedule/step.py`, `engine/loop.py` (who calls this).
"""

from enum import Enum, auto

from engine.kv.prefix import CachedBlock
from engine.schedule.roster import Roster
from engine.schedule.sequence import Sequence, Status
from engine.schedule.step import DecodeArrays, Draft, Entry, Step

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
    """Decides over a roster, whose sequences it starts, forks and preempts.

    Attributes:
        roster: the sequences and what they hold.
        num_deferred: waiting sequences that the last decision left waiting for a block being computed, not for room.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.roster = roster
        self.num_deferred = 0
        self._kv = roster.kv
        self._order = roster.order
        self._running = roster.running
        self._fence = roster.fence
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enable_chunked_prefill = enable_chunked_prefill
        self._chunk_limit = long_prefill_token_threshold or max_num_batched_tokens
        self._decoding = DecodeArrays.of([])

    # -- schedule ---------------------------------------------------------------------------

    def awaits_blocks(self) -> bool:
        """Whether the first in line waits for blocks that steps in flight compute, and the next step has room for it.

        If so it is worth settling them first, though nothing is computed while the next step is put together.
        """
        if not (self.roster.num_waiting and self.roster.num_free_rows):
            return False
        if sum(s.pending for s in self._running) >= self._max_num_batched_tokens:
            return False
        head = next(self.roster.waiting())
        num_cached = len(self._match(head)[0]) * self._kv.block_size
        stop = num_cached + self._kv.block_size
        return any(s.num_scheduled >= stop for s in self._computing(head, num_cached))

    def schedule(self) -> Step | None:
        """Decide the next step; None when nothing can run."""
        draft = Draft(self._max_num_batched_tokens)
        self._serve_entitled(draft)
        self._grant_running(draft)
        self._admit_waiting(draft)
        if draft.is_empty and not self._fence.has_steps_in_flight:
            self._take_from_beams(draft)
        if draft.is_empty:
            return None
        step = draft.make_step(self._fence.launch(), self._decoding)
        self._decoding = step.decoding
        return step

    def _serve_entitled(self, draft: Draft) -> None:
        """Admit the first waiting sequence ahead of the running ones, leaving each of these a token, if it
        comes before some of another tenant or priority. If it has no room, preempt those that it may."""
        head = next(self.roster.waiting(), None) if self.roster.num_waiting and self._running else None
        if head is None or not any(self._order.comes_before(head, s) for s in self._running):
            return
        if self._admit(draft, head, draft.budget - len(self._running)) is Admission.NO_ROOM and not self._fence:
            self._preempt_for(head)

    def _preempt_for(self, head: Sequence) -> None:
        """Make room for a waiting sequence, if preempting those that it may preempt is enough."""
        needed, chosen = self._kv.blocks_for(head.known), list[Sequence]()

        def is_enough() -> bool:
            blocks = self._kv.num_available + self._kv.num_freed_with([victim.tables for victim in chosen])
            return self.roster.num_free_rows + len(chosen) > len(head.pending_forks()) and blocks >= needed

        for victim in self._order.preemptible_for(head, self._running):
            if is_enough():
                break
            chosen.append(victim)
        if is_enough():
            for victim in chosen:
                self.roster.preempt(victim)

    def _grant_running(self, draft: Draft) -> None:
        order = self._order.sorted(self._running)
        granted = draft.granted()
        decoding, budget = draft.decoding, draft.budget
        for place, sequence in enumerate(order):
            start = sequence.num_scheduled
            if start >= sequence.decodes_until:
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
        room = len(sequence.tables[0].blocks) * self._kv.block_size
        sequence.decodes_until = min(room, sequence.max_len - 1)
        sequence.num_scheduled += 1
        sequence.in_flight += 1
        draft.budget -= 1
        draft.decoding.append(sequence)
        draft.changed.append(sequence)

    def _take_from_beams(self, draft: Draft) -> None:
        """Nothing can run and nothing is in flight: beams that wait for a preempted sibling hold what others
        need. They have their candidates already, so they lose only work; the last in the order goes first."""
        for beam in reversed(self._order.sorted(self._running)):
            if not draft.is_empty:
                break
            if beam.awaits_branch:
                self.roster.preempt(beam)
                self._grant_running(draft)
                self._admit_waiting(draft)

    def _make_room(self, draft: Draft, order: list[Sequence], place: int, num_tokens: int) -> bool:
        """Extend the tables of `order[place]`, preempting later ones if need be; False is "skip this step"."""
        sequence = order[place]
        stop = sequence.num_scheduled + num_tokens
        while (copies := self._kv.grow(sequence.tables, stop, write_from=sequence.num_scheduled)) is None:
            granted = draft.granted()
            later = (s for s in order[place + 1 :] if s not in granted)
            victim = None if self._fence else self._order.victim_among(later)
            if victim is None:
                return False
            self.roster.preempt(victim)
        draft.copies += copies
        return True

    # -- admission --------------------------------------------------------------------------

    def _admit_waiting(self, draft: Draft) -> None:
        self.num_deferred = 0
        if not self.roster.num_waiting:
            return
        passed_over: list[Sequence] = []
        for sequence in self.roster.waiting():
            if not self.roster.num_free_rows or not draft.budget or len(passed_over) >= MAX_ADMISSION_FAILURES:
                break
            if any(s.num_passed_over >= MAX_PASSED_OVER for s in passed_over):
                break
            admission = self._admit(draft, sequence, draft.budget)
            if admission is Admission.ADMITTED:
                for overtaken in passed_over:
                    overtaken.num_passed_over += 1
            elif admission is Admission.NOT_READY:
                self.num_deferred += 1
            else:
                passed_over.append(sequence)

    def _admit(self, draft: Draft, sequence: Sequence, budget: int) -> Admission:
        if sequence.in_flight or sequence.awaits_branch:
            return Admission.NOT_READY
        if budget < 1 or self.roster.num_free_rows <= len(sequence.pending_forks()):
            return Admission.NO_ROOM
        runs = self._match(sequence)
        num_cached = len(runs[0]) * self._kv.block_size
        if self._computing(sequence, num_cached):
            return Admission.NOT_READY
        if not self._enable_chunked_prefill and sequence.known - num_cached > budget:
            return Admission.NO_ROOM
        tables = self._kv.begin(runs, sequence.known, sequence.cache_root)
        if tables is None:
            return Admission.NO_ROOM
        self.roster.start(sequence, tables, num_cached)
        draft.new_rows.append(sequence.row_state())
        self._grant(draft, sequence, min(sequence.pending, budget, self._chunk_limit))
        return Admission.ADMITTED

    def _match(self, sequence: Sequence) -> list[list[CachedBlock]]:
        """Cached blocks to start from; none when prompt logprobs need every position computed."""
        if sequence.params.prompt_logprobs is not None:
            return [[] for _ in self._kv.groups]
        return self._kv.match(sequence.token_ids, sequence.cache_root)

    def _computing(self, sequence: Sequence, num_cached: int) -> list[Sequence]:
        """Running sequences that are about to complete the block after the cached ones."""
        stop = num_cached + self._kv.block_size
        if not self._kv.enable_prefix_caching or sequence.params.prompt_logprobs is not None or sequence.known <= stop:
            return []
        wanted = sequence.token_ids[:stop]
        return [
            s
            for s in self._running
            if s.num_computed < stop <= len(s.token_ids)
            and s.cache_root == sequence.cache_root
            and s.token_ids[:stop] == wanted
        ]

    # -- grant ------------------------------------------------------------------------------

    def _grant(self, draft: Draft, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_scheduled
        sequence.num_scheduled += num_tokens
        if sequence.epoch == 0 and start < sequence.prompt_len:
            self._order.fairness.charge(sequence.share, num_tokens, 0)
        samples = sequence.num_scheduled == sequence.known and sequence.max_output > 0
        self._enter(draft, sequence, start, num_tokens, samples)
        draft.budget -= num_tokens
        if samples:
            for choice in self.roster.fork(sequence):  # they sample their first token from the same logits
                draft.new_rows.append(choice.row_state())
                self._enter(draft, choice, sequence.num_scheduled, 0, True)

    def _enter(self, draft: Draft, sequence: Sequence, start: int, num_tokens: int, samples: bool) -> None:
        sequence.in_flight += 1
        sequence.in_flight_unsampled += not samples
        if samples:
            sequence.is_decoding = not sequence.params.use_beam_search
            self._order.fairness.charge(sequence.share, 0, 1)
        targets = self._prompt_targets(sequence, start)
        draft.entries.append(Entry(sequence, start, num_tokens, sequence.epoch, samples, targets))

    def _prompt_targets(self, sequence: Sequence, start: int) -> range:
        if sequence.params.prompt_logprobs is None:
            return range(0)
        first = max(start, sequence.num_prompt_logprobs_launched)
        stop = max(first, min(sequence.num_scheduled, sequence.prompt_len - 1))
        sequence.num_prompt_logprobs_launched = stop
        return range(first, stop)
