"""BlockPool: who holds each block, and in which order unheld ones are reused.

Every block is in exactly one state:

    used    refcount > 0: held by sequences or by a fence
    cached  refcount = 0, contents named in the prefix index; may be revived or taken
    free    refcount = 0, contents worthless

Free and cached blocks form one intrusive doubly linked list, reused from its front: worthless
blocks are put in front, cached ones at the back, so the list's order is the LRU of the cache.
All operations but `states` and `available` are O(1). Read next: `engine/kv/prefix.py`.
"""

import numpy as np
import numpy.typing as npt

FREE, CACHED, USED, SHARED = range(4)
"""States of a block as numbers; SHARED is used with more than one reference."""

_NONE = -1


class BlockPool:
    """Reference counts and the free list of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is out of range, must be at least 1")
        self._refs = [0] * num_blocks
        self._is_cached = [False] * num_blocks
        # One extra node, the sentinel, closes the list into a ring.
        self._end = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self.num_available = num_blocks
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        """Blocks with neither a reference nor contents worth keeping."""
        return self.num_available - self.num_cached

    def refs(self, block: int) -> int:
        """References held on `block`."""
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        """Whether the prefix index names the contents of `block`."""
        return self._is_cached[block]

    def front(self) -> int:
        """The block that `take` would return. Raises IndexError when nothing is available."""
        block = self._next[self._end]
        if block == self._end:
            raise IndexError("no block is available")
        return block

    def take(self) -> int:
        """Take the block at the front, with one reference; its contents are no longer cached."""
        block = self.front()
        self._unlink(block)
        if self._is_cached[block]:
            self._is_cached[block] = False
            self.num_cached -= 1
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference; revives a cached block from the free list."""
        if self._refs[block] == 0:
            if not self._is_cached[block]:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._unlink(block)
            self.num_cached -= 1
        self._refs[block] += 1

    def give(self, block: int) -> None:
        """Drop a reference; the last one returns the block to the list."""
        refs = self._refs[block]
        if refs <= 0:
            raise ValueError(f"block {block} is given back without being held")
        self._refs[block] = refs - 1
        if refs == 1:
            cached = self._is_cached[block]
            self._link(block, before=self._end if cached else self._next[self._end])
            self.num_cached += cached

    def mark_cached(self, block: int, cached: bool) -> None:
        """Record that the prefix index starts or stops naming the contents of `block`."""
        if self._is_cached[block] == cached:
            return
        self._is_cached[block] = cached
        if self._refs[block] == 0:
            self._unlink(block)
            self._link(block, before=self._end if cached else self._next[self._end])
            self.num_cached += 1 if cached else -1

    def states(self) -> npt.NDArray[np.uint8]:
        """The state of every block, [num_blocks]: one of FREE, CACHED, USED, SHARED."""
        try:
            counts = bytes(self._refs)  # 5 ns a block, a quarter of what numpy takes
        except ValueError:  # more than 255 references
            counts = bytes([min(n, 255) for n in self._refs])
        refs, cached = np.frombuffer(counts, np.uint8), np.frombuffer(bytes(self._is_cached), np.uint8)
        return np.where(refs == 0, cached, np.minimum(refs, 2) + 1).astype(np.uint8)

    def available(self) -> list[int]:
        """Blocks without a reference, in the order in which they will be taken."""
        order = []
        block = self._next[self._end]
        while block != self._end:
            order.append(block)
            block = self._next[block]
        return order

    def _unlink(self, block: int) -> None:
        links, back = self._next, self._prev
        before, after = back[block], links[block]
        links[before], back[after] = after, before
        links[block] = back[block] = _NONE
        self.num_available -= 1

    def _link(self, block: int, before: int) -> None:
        after_of = self._prev[before]
        self._next[after_of] = self._prev[before] = block
        self._prev[block], self._next[block] = after_of, before
        self.num_available += 1
