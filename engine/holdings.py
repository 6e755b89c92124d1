"""Holdings: rows and blocks on their way from the free ones to a sequence and, through the fence, back.

What a sequence gives up while steps are in flight waits in the fence for the last of them. Numbers of the steps
launched and settled are kept here, because they decide that. Read next: `engine/kv/fence.py`, `engine/scheduler.py`.
"""

from collections.abc import Iterator

from engine.kv.fence import Fence, Fenced
from engine.kv.manager import KVManager, Lease
from engine.sequence import Sequence


class Holdings:
    """Belongs to the scheduler.

    Attributes:
        free_rows: rows that nobody holds, the next one last.
    """

    def __init__(self, kv: KVManager, num_rows: int) -> None:
        self.kv = kv
        self.fence = Fence()
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self._num_rows = num_rows
        self._last_launched = 0
        self._last_settled = 0

    @property
    def has_steps_in_flight(self) -> bool:
        """Whether a step launched has not settled."""
        return self._last_launched > self._last_settled

    def launch(self) -> int:
        """The number of the step launched now."""
        self._last_launched += 1
        return self._last_launched

    def settle(self, step: int) -> None:
        """The oldest step in flight has ended; opens the fence for what waited for it."""
        if step != self._last_settled + 1:
            raise ValueError(f"step {step} settles after step {self._last_settled}")
        self._last_settled = step
        for fenced in self.fence.settle(step):
            self._release(fenced)

    def vacate(self, sequence: Sequence) -> None:
        """Take a running sequence's rows and blocks away."""
        rows = (sequence.row, *sequence.fork_rows)
        self.free(Fenced(self.kv.detach(sequence.tables), rows))
        sequence.tables = []
        sequence.row = -1
        sequence.fork_rows = []
        sequence.is_decoding = False
        sequence.decodes_until = 0

    def free(self, fenced: Fenced) -> None:
        """Take back rows and blocks that a step in flight may still use."""
        if self.has_steps_in_flight:
            self.fence.hold(self._last_launched, fenced)
        else:
            self._release(fenced)

    def _release(self, fenced: Fenced) -> None:
        self.kv.release(fenced.blocks)
        self.free_rows.extend(fenced.rows)

    # -- inspection -------------------------------------------------------------------------

    def fill(self, running: list[Sequence]) -> float:
        """Share of the slots in used blocks that hold tokens, those being computed included; 1 when none is used."""
        num_used = self.kv.num_blocks - self.kv.num_available
        if not num_used:
            return 1.0
        block_size = self.kv.block_size
        # Empty slots are behind a sequence's last token, in pages of its own (forks share one until they write).
        empty = self.kv.num_pages * block_size - sum([s.num_scheduled for s in running])
        return max(0.0, 1.0 - empty / (num_used * block_size))

    def leases(self, running: list[Sequence]) -> Iterator[Lease]:
        """Every lease on blocks that exists."""
        for sequence in running:
            yield tuple(tuple(table.blocks) for table in sequence.tables)
        for fenced in self.fence:
            yield fenced.blocks

    def audit(self, running: list[Sequence]) -> list[str]:
        """Check blocks and rows against their holders; returns what is wrong, [] if nothing."""
        problems = self.kv.audit(self.leases(running))
        held = [row for s in running for row in (s.row, *s.fork_rows)]
        held += [row for fenced in self.fence for row in fenced.rows]
        if sorted(held + self.free_rows) != list(range(self._num_rows)):
            problems.append(f"rows: {sorted(held)} are held while {sorted(self.free_rows)} are free")
        num_pages = sum(len(s.tables[0].blocks) for s in running)
        if num_pages != self.kv.num_pages:
            problems.append(f"{num_pages} pages are in block tables, {self.kv.num_pages} are counted")
        return problems
