"""KVManager: block tables of sequences, over one pool and one prefix index per KV group.

A sequence's references are a lease: `begin` and `grow` add to it, `detach` ends it, and what
`detach` returns goes to `release`, at once or through the fence. A block enters the index only
when its contents are computed and settled; hits are whole blocks. Read next: `engine/schedule/scheduler.py`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.kv.events import BlockFeed, Parent, Stored
from engine.kv.groups import KVGroup
from engine.kv.pool import BlockPool
from engine.kv.prefix import CachedBlock, PrefixIndex, token_key
from engine.plan import BlockCopy


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in one group.

    Attributes:
        blocks: block of each page, in order of position.
        num_sent: leading entries that the device knows.
        num_indexed: leading blocks whose contents are in the prefix index.
        parent: uid of the last indexed block, or the root.
    """

    parent: Parent
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0
    num_indexed: int = 0


Lease = tuple[tuple[int, ...], ...]
"""Blocks per group whose references somebody must release."""


class KVManager:
    """Gives blocks to sequences. Counts are per group; every group's pool has the same size.

    Attributes:
        num_pages: entries of all block tables that hold a lease, in one group.
    """

    def __init__(
        self, groups: Sequence[KVGroup], num_blocks: int, block_size: int, *, enable_prefix_caching: bool
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_pages = 0
        self._pools = [BlockPool(num_blocks) for _ in self.groups]
        self._indexes = [PrefixIndex() for _ in self.groups]

    @property
    def num_available(self) -> int:
        """Blocks that could be taken now, in the scarcest group."""
        return min([pool.num_available for pool in self._pools])

    @property
    def num_cached(self) -> int:
        """Those of `num_available` that the prefix index can still serve, in the scarcest group."""
        return min(self._pools, key=lambda pool: pool.num_available).num_cached

    @property
    def usage(self) -> float:
        """Share of the blocks in use, in the fullest group."""
        return 1.0 - self.num_available / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def match(self, token_ids: Sequence[int], root: str) -> list[list[CachedBlock]]:
        """Longest run of cached blocks that begin `token_ids`, equally long in every group.

        At least the last token is left to compute, so 16 tokens match nothing and 17 match 16.
        """
        limit = (len(token_ids) - 1) // self.block_size if self.enable_prefix_caching else 0
        keys: list[bytes] = []
        runs: list[list[CachedBlock]] = []
        for index in self._indexes:
            run: list[CachedBlock] = []
            parent: Parent = root
            while len(run) < limit:
                if len(keys) == len(run):
                    start = len(run) * self.block_size
                    keys.append(token_key(token_ids[start : start + self.block_size]))
                entry = index.find(parent, keys[len(run)])
                if entry is None:
                    break
                run.append(entry)
                parent = entry.uid
            limit = len(run)
            runs.append(run)
        return [run[:limit] for run in runs]

    def num_freed_with(self, holders: Sequence[list[BlockTable]]) -> int:
        """Blocks that nobody would hold any more without these tables, in the scarcest group."""
        freed = []
        for g, pool in enumerate(self._pools):
            held = Counter(block for tables in holders for block in tables[g].blocks)
            freed.append(sum(pool.refs(block) == n for block, n in held.items()))
        return min(freed)

    def begin(self, runs: list[list[CachedBlock]], num_tokens: int, root: str) -> list[BlockTable] | None:
        """Tables that share the matched `runs` and have room for `num_tokens`; None if it does not fit."""
        needed = self.blocks_for(num_tokens)
        for pool, run in zip(self._pools, runs, strict=True):
            revived = sum(pool.refs(entry.block) == 0 for entry in run)
            if needed - len(run) > pool.num_available - revived:
                return None
        tables = []
        for pool, run in zip(self._pools, runs, strict=True):
            for entry in run:
                pool.share(entry.block)
            parent = run[-1].uid if run else root
            tables.append(BlockTable(parent, [entry.block for entry in run], num_indexed=len(run)))
        self.num_pages += len(runs[0])
        self._extend(tables, needed)
        return tables

    def grow(self, tables: list[BlockTable], num_tokens: int, *, write_from: int) -> list[BlockCopy] | None:
        """Make room to write positions `[write_from, num_tokens)`.

        A block written to that others hold as well is replaced by a copy. Returns the copies to make,
        or None, with nothing changed, if it does not fit.
        """
        needed, page = self.blocks_for(num_tokens), write_from // self.block_size
        shared = []
        for g, table in enumerate(tables):
            pool, blocks = self._pools[g], table.blocks
            if page < len(blocks) and pool.refs(blocks[page]) > 1:
                shared.append(g)
            if needed - len(blocks) + (g in shared) > pool.num_available:
                return None
        self._extend(tables, needed)
        return [self._replace(g, tables[g], page) for g in shared]

    def fork(self, tables: list[BlockTable]) -> list[BlockTable]:
        """Tables that share every block of `tables`; who writes first gets a copy, by `grow`."""
        for pool, table in zip(self._pools, tables, strict=True):
            for block in table.blocks:
                pool.share(block)
        self.num_pages += len(tables[0].blocks)
        return [BlockTable(t.parent, t.blocks.copy(), num_indexed=t.num_indexed) for t in tables]

    def _extend(self, tables: list[BlockTable], needed: int) -> None:
        self.num_pages += max(0, needed - len(tables[0].blocks))
        for g, table in enumerate(tables):
            while len(table.blocks) < needed:
                table.blocks.append(_take(self._pools[g], self._indexes[g]))

    def _replace(self, g: int, table: BlockTable, page: int) -> BlockCopy:
        source, target = table.blocks[page], _take(self._pools[g], self._indexes[g])
        self._pools[g].give(source)
        table.blocks[page] = target
        table.num_sent = min(table.num_sent, page)
        return BlockCopy(g, source, target)

    def index(self, tables: list[BlockTable], token_ids: Sequence[int], num_computed: int) -> Lease | None:
        """Name the full blocks among the first `num_computed` tokens.

        A duplicate of contents already named adopts the existing block; the lease returned holds
        the blocks given up that way, which a step in flight may still read.
        """
        num_full = num_computed // self.block_size if self.enable_prefix_caching else 0
        if not tables or tables[0].num_indexed >= num_full:  # as many in every group
            return None
        given_up: list[list[int]] | None = None
        for g, table in enumerate(tables):
            while table.num_indexed < num_full:
                start = table.num_indexed * self.block_size
                tokens = token_key(token_ids[start : start + self.block_size])
                own = self._index_next(g, table, tokens)
                if own is not None:
                    given_up = given_up or [[] for _ in tables]
                    given_up[g].append(own)
        return None if given_up is None else tuple(map(tuple, given_up))

    def _index_next(self, g: int, table: BlockTable, tokens: bytes) -> int | None:
        """Name the next block of a table; returns the block that it held before if it adopted another."""
        page = table.num_indexed
        own = table.blocks[page]
        entry = self._indexes[g].find(table.parent, tokens)
        if entry is None:
            if self._pools[g].is_cached(own):
                # A fork's shared block, named by its sibling behind a parent that a reset has forgotten.
                self._indexes[g].evict(own)
            entry = self._indexes[g].insert(table.parent, tokens, own)
            self._pools[g].mark_cached(own, True)
        elif entry.block != own:
            self._pools[g].share(entry.block)
            table.blocks[page] = entry.block
            table.num_sent = min(table.num_sent, page)
        table.parent = entry.uid
        table.num_indexed += 1
        return None if entry.block == own else own

    def detach(self, tables: list[BlockTable]) -> Lease:
        """End the tables' lease; the caller passes the result to `release`, once."""
        lease = tuple(tuple(table.blocks) for table in tables)
        for table in tables:
            table.blocks = []
        self.num_pages -= len(lease[0]) if lease else 0
        return lease

    def release(self, lease: Lease) -> None:
        """Drop the references of a lease, the tail first, so that the head lives longest."""
        for pool, blocks in zip(self._pools, lease, strict=True):
            for block in reversed(blocks):
                pool.give(block)

    def reset_prefix_cache(self, tenant: str | None = None) -> None:
        """Forget all contents, or those of `tenant`. Blocks in use stay with their holders and are not found."""
        for pool, index in zip(self._pools, self._indexes, strict=True):
            for block in index.blocks() if tenant is None else index.blocks_of(tenant):
                index.evict(block)
                pool.mark_cached(block, False)

    def follow(self, feed: BlockFeed) -> list[Stored]:
        """Tell `feed` what can be found from now on; returns what is there now. All groups hold the same contents."""
        return self._indexes[0].follow(feed)

    def block_states(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """Per group, the state of every block, as `BlockPool.states`."""
        return tuple(pool.states() for pool in self._pools)

    def audit(self, holders: Iterable[Lease]) -> list[str]:
        """Check every count against the leases that exist; returns what is wrong, [] if nothing."""
        leases = list(holders)
        problems = []
        for g, (pool, index) in enumerate(zip(self._pools, self._indexes, strict=True)):
            held = [0] * self.num_blocks
            for lease in leases:
                for block in lease[g]:
                    held[block] += 1
            problems += [
                f"group {g}: block {block} has {pool.refs(block)} references, {n} holders"
                for block, n in enumerate(held)
                if pool.refs(block) != n
            ]
            if sorted(index.blocks()) != [b for b in range(self.num_blocks) if pool.is_cached(b)]:
                problems.append(f"group {g}: the index and the pool disagree on what is cached")
            unheld = [b for b, n in enumerate(held) if n == 0]
            if sorted(pool.available()) != unheld or pool.num_available != len(unheld):
                problems.append(f"group {g}: the free list does not hold the blocks without holders")
            if pool.num_cached != sum(map(pool.is_cached, unheld)):
                problems.append(f"group {g}: {pool.num_cached} blocks are counted as cached")
        return problems


def _take(pool: BlockPool, index: PrefixIndex) -> int:
    if not pool.num_free and pool.num_cached:  # cached blocks are behind the free ones
        index.evict(pool.front())
    return pool.take()
