"""Roster: the sequences, by what they do, and what each of them holds: a row, blocks, steps in flight.

    add      -> WAITING, in the queue of its tenant
    start    WAITING -> RUNNING, with a row for itself and for each choice that will fork, on the blocks it is given
    fork     PENDING -> RUNNING: the choices of a request, on a row each and the blocks of the first
    preempt  RUNNING -> WAITING; row and blocks go back through the fence
    finish   -> FINISHED, from wherever it is

Every change of status is here, and rows and blocks change hands nowhere else. Decisions are made by
`engine/schedule/scheduler.py` and `engine/schedule/settle.py`. Read next: `engine/schedule/order.py` (who goes before
whom), `engine/kv/fence.py`, `engine/kv/manager.py`.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator

from engine.kv.fence import Fence, Fenced
from engine.kv.manager import BlockTable, KVManager, Lease
from engine.schedule.order import Order, fixed_rank
from engine.schedule.sequence import Sequence, Status


class Roster:
    """Belongs to the loop's task.

    Attributes:
        kv: the blocks.
        fence: steps in flight, and what is freed when they have settled.
        order: ranks sequences.
        running: sequences with a row, sorted by `fixed_rank`; always the same list.
        num_preemptions: how often a sequence lost its row and blocks.
    """

    def __init__(self, kv: KVManager, max_num_seqs: int) -> None:
        self.kv = kv
        self.fence = Fence(self._release)
        self.order = Order(max_num_seqs)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._num_rows = max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))  # the next one last
        self._waiting: dict[str, list[Sequence]] = {}
        self._num_arrived = 0

    # -- what sequences do ------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, whose choices count as present with it. It must fit when it is alone."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        for choice in (sequence, *sequence.forks):
            choice.arrival = sequence.arrival
            self.order.fairness.arrive(choice.share)
        self._enqueue(sequence)

    def start(self, sequence: Sequence, tables: list[BlockTable], num_cached: int) -> None:
        """One that waited runs from now on, on blocks of which the first `num_cached` tokens are computed."""
        self._dequeue(sequence)
        sequence.tables = tables
        sequence.row = self._free_rows.pop()
        sequence.fork_rows = [self._free_rows.pop() for _ in sequence.pending_forks()]
        sequence.num_scheduled = sequence.num_computed = num_cached
        if sequence.epoch == 0:
            sequence.num_cached_tokens = num_cached
        self._run(sequence)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The other choices of the request run from now on; returns them. They share every block."""
        choices = sequence.pending_forks()
        for choice in choices:
            choice.row = sequence.fork_rows.pop()
            choice.tables = self.kv.fork(sequence.tables)
            choice.num_scheduled = choice.num_computed = sequence.num_scheduled
            choice.num_cached_tokens = sequence.num_cached_tokens
            self._run(choice)
        self._free_rows.extend(sequence.fork_rows)  # of choices that were aborted before they began
        sequence.fork_rows = []
        return choices

    def preempt(self, sequence: Sequence) -> None:
        """Back to its queue with its tokens; what it had computed is lost."""
        self._vacate(sequence)
        sequence.num_scheduled = sequence.num_computed = 0
        sequence.epoch += 1
        sequence.protected = True
        self.num_preemptions += 1
        self._enqueue(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, in whatever state it is; harmless when it is finished already."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._vacate(sequence)
        elif sequence.status is Status.WAITING:
            self._dequeue(sequence)
        sequence.status = Status.FINISHED
        self.order.fairness.leave(sequence.share)

    def give_up(self, blocks: Lease) -> None:
        """A running sequence goes on without these blocks, which a step in flight may still use."""
        self.fence.free(Fenced(blocks, ()))

    def _run(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=fixed_rank)
        sequence.status = Status.RUNNING

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.fence.free(Fenced(self.kv.detach(sequence.tables), (sequence.row, *sequence.fork_rows)))
        sequence.tables = []
        sequence.is_decoding = False
        sequence.decodes_until = 0

    def _release(self, fenced: Fenced) -> None:
        self.kv.release(fenced.blocks)
        self._free_rows.extend(fenced.rows)

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting.setdefault(sequence.share, []), sequence, key=fixed_rank)
        sequence.status = Status.WAITING

    def _dequeue(self, sequence: Sequence) -> None:
        queue = self._waiting[sequence.share]
        queue.remove(sequence)
        if not queue:
            del self._waiting[sequence.share]

    # -- inspection -------------------------------------------------------------------------

    @property
    def num_free_rows(self) -> int:
        """Rows that could be taken now."""
        return len(self._free_rows)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, new or preempted."""
        return sum(map(len, self._waiting.values()))

    def waiting(self) -> Iterator[Sequence]:
        """Waiting sequences, in order."""
        return self.order.merged(self._waiting.values())

    def waiting_by_tenant(self) -> dict[str, int]:
        """`num_waiting` of each tenant that has any."""
        return Counter(sequence.tenant for queue in self._waiting.values() for sequence in queue)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not self.running and not self._waiting and not self.fence.has_steps_in_flight

    @property
    def kv_fill(self) -> float:
        """Share of the slots in used blocks that hold tokens, those being computed included; 1 when none is used."""
        num_used = self.kv.num_blocks - self.kv.num_available
        if not num_used:
            return 1.0
        block_size = self.kv.block_size
        # Empty slots are behind a sequence's last token, in pages of its own (forks share one until they write).
        empty = self.kv.num_pages * block_size - sum([s.num_scheduled for s in self.running])
        return max(0.0, 1.0 - empty / (num_used * block_size))

    def audit(self) -> list[str]:
        """Check blocks and rows against their holders; returns what is wrong, [] if nothing."""
        problems = self.kv.audit(self._leases())
        held = [row for s in self.running for row in (s.row, *s.fork_rows)]
        held += [row for fenced in self.fence for row in fenced.rows]
        if sorted(held + self._free_rows) != list(range(self._num_rows)):
            problems.append(f"rows: {sorted(held)} are held while {sorted(self._free_rows)} are free")
        num_pages = sum(len(s.tables[0].blocks) for s in self.running)
        if num_pages != self.kv.num_pages:
            problems.append(f"{num_pages} pages are in block tables, {self.kv.num_pages} are counted")
        if self.is_idle and len(self.fence):
            problems.append(f"idle with {len(self.fence)} fenced leases")
        return problems

    def _leases(self) -> Iterator[Lease]:
        for sequence in self.running:
            yield tuple(tuple(table.blocks) for table in sequence.tables)
        for fenced in self.fence:
            yield fenced.blocks
