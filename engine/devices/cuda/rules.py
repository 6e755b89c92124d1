"""RuleArena: the rows' sampling rules, each a list of words, in one array on the GPU.

Rows with rules are few and most rules short, so the arena grows with what is in use. An outgrown array is kept: steps
in flight may read it, and since sizes double, all of them together take no more than the last.
Read next: `pack_row` in `engine/devices/cuda/ops/sampling.py`, which makes the lists.
"""

from typing import Any

import numpy as np

_FIRST_WORDS = 4096


class RuleArena:
    """Regions of one i32 array, one per row that has rules.

    Attributes:
        words: the array; another one after it has grown.
    """

    def __init__(self) -> None:
        import cupy

        self.words = cupy.empty((_FIRST_WORDS,), np.int32)
        self._regions: dict[int, range] = {}
        self._outgrown: list[Any] = []

    def place(self, row: int, length: int, stream: Any) -> int:
        """First word of a new region for the row, in place of its last one."""
        self._regions.pop(row, None)
        if length == 0:
            return 0
        first = 0
        for region in sorted(self._regions.values(), key=lambda region: region.start):
            if first + length <= region.start:
                break
            first = region.stop
        self._regions[row] = range(first, first + length)
        self._reserve(first + length, stream)
        return first

    def _reserve(self, length: int, stream: Any) -> None:
        import cupy

        old = self.words
        if length > len(old):
            self.words = cupy.empty((max(length, 2 * len(old)),), np.int32)
            self.words.data.copy_from_device_async(old.data, old.nbytes, stream)
            self._outgrown.append(old)
