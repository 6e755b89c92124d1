"""Fence: what was freed while the device may still use it.

A step in flight may read or write the blocks and the row of a sequence that the host has
already dropped. They are put here with the last step launched, and come out when that
step has settled. This is the only place where freed things wait.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple


class Fenced(NamedTuple):
    """Blocks per KV group, and the rows that are freed with them."""

    blocks: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]


class Fence:
    """First in, first out by step number."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Fenced]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Fenced]:
        return (fenced for _, fenced in self._waiting)

    def hold(self, last_launched: int, fenced: Fenced) -> None:
        """Keep `fenced` until step `last_launched` has settled."""
        self._waiting.append((last_launched, fenced))

    def settle(self, step: int) -> Iterator[Fenced]:
        """Yield what waited for steps up to and including `step`."""
        while self._waiting and self._waiting[0][0] <= step:
            yield self._waiting.popleft()[1]
