"""Roster: the sequences, by what they do: wait, run, or have ended. Every change of status is here.

    add      -> WAITING, in the queue of its tenant
    start    WAITING -> RUNNING, on the row and the blocks it was given
    preempt  RUNNING -> WAITING; rows and blocks go back through the fence
    finish   -> FINISHED, from wherever it is

Read next: `engine/order.py` (who goes before whom), `engine/holdings.py`, `engine/scheduler.py`.
"""

from bisect import insort
from collections.abc import Iterator

from engine.holdings import Holdings
from engine.kv.manager import KVManager
from engine.order import Order, fixed_rank
from engine.sequence import Sequence, Status


class Roster:
    """Belongs to the scheduler, which decides, and to its settler, which takes in what came of it.

    Attributes:
        running: sequences with a row, sorted by `fixed_rank`; always the same list.
        num_preemptions: so far.
    """

    def __init__(self, kv: KVManager, max_num_seqs: int) -> None:
        self.running: list[Sequence] = []
        self.holdings = Holdings(kv, max_num_seqs)
        self.order = Order(max_num_seqs)
        self.num_preemptions = 0
        self._waiting: dict[str, list[Sequence]] = {}
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, new or preempted."""
        return sum(map(len, self._waiting.values()))

    def waiting_by_tenant(self) -> dict[str, int]:
        """`num_waiting` of each tenant that has any."""
        return {tenant: len(queue) for tenant, queue in self._waiting.items()}

    def waiting(self) -> Iterator[Sequence]:
        """Waiting sequences, in order."""
        return self.order.merged(self._waiting.values())

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not self.running and not self._waiting and not self.holdings.has_steps_in_flight

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, whose choices count as present with it."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        for choice in (sequence, *sequence.forks):
            choice.arrival = sequence.arrival
            self.order.fairness.arrive(choice.tenant)
        self._enqueue(sequence)

    def start(self, sequence: Sequence) -> None:
        """It runs from now on: one that waited, or a choice that forks."""
        if sequence.status is Status.WAITING:
            self._dequeue(sequence)
        insort(self.running, sequence, key=fixed_rank)
        sequence.status = Status.RUNNING

    def preempt(self, sequence: Sequence) -> None:
        """Back to its queue with its tokens; what it had computed is lost."""
        self.running.remove(sequence)
        self.holdings.vacate(sequence)
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
            self.running.remove(sequence)
            self.holdings.vacate(sequence)
        elif sequence.status is Status.WAITING:
            self._dequeue(sequence)
        sequence.status = Status.FINISHED
        self.order.fairness.leave(sequence.tenant)

    def audit(self) -> list[str]:
        """Check blocks and rows against their holders; returns what is wrong, [] if nothing."""
        problems = self.holdings.audit(self.running)
        if self.is_idle and len(self.holdings.fence):
            problems.append(f"idle with {len(self.holdings.fence)} fenced leases")
        return problems

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting.setdefault(sequence.tenant, []), sequence, key=fixed_rank)
        sequence.status = Status.WAITING

    def _dequeue(self, sequence: Sequence) -> None:
        queue = self._waiting[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._waiting[sequence.tenant]
