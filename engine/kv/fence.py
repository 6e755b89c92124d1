"""Fence: steps in flight, and what was freed while the device may still use it.

A step in flight may read or write the blocks and the row of a sequence that the host has already dropped. They wait
here for the last step launched before they were freed. This is the only place where freed things wait, and the only
one that knows which steps are in flight.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Fenced(NamedTuple):
    """Blocks per KV group, and the rows that are freed with them."""

    blocks: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]


class Fence:
    """First in, first out by step number. Steps are numbered from 1 and settle in order."""

    def __init__(self, release: Callable[[Fenced], None]) -> None:
        """`release` takes what no step in flight can use any more."""
        self._release = release
        self._waiting: deque[tuple[int, Fenced]] = deque()
        self._last_launched = 0
        self._last_settled = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Fenced]:
        return (fenced for _, fenced in self._waiting)

    @property
    def has_steps_in_flight(self) -> bool:
        """Whether a step launched has not settled."""
        return self._last_launched > self._last_settled

    def launch(self) -> int:
        """The number of the step launched now."""
        self._last_launched += 1
        return self._last_launched

    def settle(self, step: int) -> None:
        """The oldest step in flight has ended; releases what waited for it. Raises ValueError for another step."""
        if step != self._last_settled + 1 or step > self._last_launched:
            raise ValueError(f"step {step} settles after step {self._last_settled} of {self._last_launched} launched")
        self._last_settled = step
        while self._waiting and self._waiting[0][0] <= step:
            self._release(self._waiting.popleft()[1])

    def free(self, fenced: Fenced) -> None:
        """Release as soon as every step launched so far has settled."""
        if self.has_steps_in_flight:
            self._waiting.append((self._last_launched, fenced))
        else:
            self._release(fenced)
