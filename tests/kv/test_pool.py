"""BlockPool against a naive model: sets and a list."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.pool import CACHED, FREE, SHARED, USED, BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """The model keeps references in a dict and the reuse order in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.refs = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.cached: set[int] = set()
        self.order = list(range(NUM_BLOCKS))

    def _put_back(self, block: int) -> None:
        if block in self.cached:
            self.order.append(block)
        else:
            self.order.insert(0, block)

    @precondition(lambda self: self.order)
    @rule()
    def take(self) -> None:
        block = self.pool.take()
        assert block == self.order.pop(0)
        self.cached.discard(block)
        self.refs[block] = 1

    @precondition(lambda self: not self.order)
    @rule()
    def take_from_empty(self) -> None:
        with pytest.raises(IndexError):
            self.pool.take()

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def share(self, block: int) -> None:
        if self.refs[block] == 0 and block not in self.cached:
            with pytest.raises(ValueError):
                self.pool.share(block)
            return
        self.pool.share(block)
        if self.refs[block] == 0:
            self.order.remove(block)
        self.refs[block] += 1

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def give(self, block: int) -> None:
        if self.refs[block] == 0:
            with pytest.raises(ValueError):
                self.pool.give(block)
            return
        self.pool.give(block)
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._put_back(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1), cached=st.booleans())
    def mark(self, block: int, cached: bool) -> None:
        if cached == (block in self.cached):
            self.pool.mark_cached(block, cached)
            return
        self.pool.mark_cached(block, cached)
        (self.cached.add if cached else self.cached.discard)(block)
        if self.refs[block] == 0:
            self.order.remove(block)
            self._put_back(block)

    @invariant()
    def agrees(self) -> None:
        assert self.pool.available() == self.order
        assert self.pool.num_available == len(self.order)
        assert self.pool.num_cached == len(self.cached & set(self.order))
        assert self.pool.num_free == len(set(self.order) - self.cached)
        assert [self.pool.refs(b) for b in range(NUM_BLOCKS)] == list(self.refs.values())
        assert {b for b in range(NUM_BLOCKS) if self.pool.is_cached(b)} == self.cached
        assert self.pool.states().tolist() == [
            (SHARED if n > 1 else USED) if n else (CACHED if b in self.cached else FREE) for b, n in self.refs.items()
        ]


TestPool = pytest.mark.slow(PoolMachine.TestCase)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_a_block_that_very_many_share_is_shared() -> None:
    pool = BlockPool(3)
    blocks = [pool.take(), pool.take()]
    for _ in range(1000):
        pool.share(blocks[0])
    assert sorted(pool.states().tolist()) == [FREE, USED, SHARED]
    assert pool.states()[blocks].tolist() == [SHARED, USED]
