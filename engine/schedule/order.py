"""Order: who goes before whom, and who may be preempted for whom.

    priority, then the tenant served least, then arrival, then the index of the choice

Where there are no tenants (no API keys), every client's address is one here; `Sequence.share` has either.
Within a tenant the order never changes (`fixed_rank`), which is how the roster keeps its lists; among tenants it moves
with their counters. Each tenant has a counter of the tokens it was served; the lowest goes first. A tenant that comes
back is lifted to the lowest counter among those present, so that idling saves nothing up. Source: the Virtual Token
Counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Read next: docs/scheduling.md.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from heapq import merge

from engine.schedule.sequence import Sequence, Status

OUTPUT_WEIGHT = 2.0
"""An output token costs this many prompt tokens, as in the paper."""


MAX_REMEMBERED = 4096
"""Tenants whose counters are kept while they are away: clients' addresses have no end."""


class Fairness:
    """Counters and presence of tenants."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._present: defaultdict[str, int] = defaultdict(int)

    @property
    def num_present(self) -> int:
        """Tenants with a request."""
        return len(self._present)

    def arrive(self, tenant: str) -> None:
        """A request of `tenant` came."""
        if tenant not in self._present:
            floor = min((self._served[t] for t in self._present), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of `tenant` ended."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
            if len(self._served) > MAX_REMEMBERED:
                self._served = {t: self._served[t] for t in self._present}

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """`tenant` was served these tokens."""
        self._served[tenant] += prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def served(self, tenant: str) -> float:
        """The counter; lower goes first."""
        return self._served[tenant]


def fixed_rank(sequence: Sequence) -> tuple[int, int, int]:
    """The order within a tenant."""
    return (sequence.priority, sequence.arrival, sequence.index)


class Order:
    """Ranks sequences, over the tenants' counters."""

    def __init__(self, max_num_seqs: int) -> None:
        self.fairness = Fairness()
        self._max_num_seqs = max_num_seqs

    def rank(self, sequence: Sequence) -> tuple[int, float, int, int]:
        """Lower goes first."""
        return (sequence.priority, self.fairness.served(sequence.share), sequence.arrival, sequence.index)

    def charge_outputs(self, sequences: list[Sequence]) -> None:
        """Each of these is given an output token."""
        if self.fairness.num_present == 1 and sequences:
            self.fairness.charge(sequences[0].share, 0, len(sequences))
            return
        for tenant, count in Counter([s.share for s in sequences]).items():
            self.fairness.charge(tenant, 0, count)

    def sorted(self, running: list[Sequence]) -> list[Sequence]:
        """A copy of `running`, which is sorted by `fixed_rank`, in order."""
        return running.copy() if self.fairness.num_present == 1 else sorted(running, key=self.rank)

    def merged(self, queues: Iterable[list[Sequence]]) -> Iterator[Sequence]:
        """The tenants' queues, each sorted, as one in order: lazily, so that it stays right while
        admissions change the counters."""
        return merge(*(queue.copy() for queue in queues), key=self.rank)

    def comes_before(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether one that waits goes before one that runs, of another tenant or priority."""
        is_apart = (waiting.priority, waiting.share) != (running.priority, running.share)
        return is_apart and self.rank(waiting) < self.rank(running)

    def preemptible_for(self, waiting: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Running sequences that may be preempted to admit `waiting`, first victim first: of lower priority,
        or of a tenant above its share of the rows while the other's is below, down to that share; none that is
        protected."""
        share = self._max_num_seqs / self.fairness.num_present
        held: dict[str, int] = {}
        for s in running:
            held[s.share] = held.get(s.share, 0) + 1
        is_below = held.get(waiting.share, 0) < share
        victims = []
        for s in sorted((s for s in running if not s.protected), key=_work_lost):
            is_above = is_below and held[s.share] > share and s.priority == waiting.priority
            if s.priority > waiting.priority or is_above:
                held[s.share] -= 1
                victims.append(s)
        return victims

    @staticmethod
    def victim_among(later: Iterable[Sequence]) -> Sequence | None:
        """The one to preempt among running sequences `later` in the order than one in need of a block."""
        running = [s for s in later if s.status is Status.RUNNING]
        unprotected = [s for s in running if not s.protected]
        return min(unprotected, key=_work_lost) if unprotected else running[-1] if running else None


def _work_lost(sequence: Sequence) -> tuple[int, int]:
    return (sequence.num_scheduled, -sequence.arrival)
