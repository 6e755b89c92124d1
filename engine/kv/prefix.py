"""PrefixIndex: which block holds the keys and values of which tokens.

A radix tree at block granularity, kept as one dict from (parent, token bytes) to block: an exact
match, so there is no hash to collide. The parent is the *uid* of the block before, or for a first
block the root, a string that isolates tenants and salts. A uid names contents and is never used
twice, so that a recycled block can't make a false hit. Who follows the index is told what enters and
leaves it; without followers that costs a look at an empty list. Read next: `engine/kv/manager.py`.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from engine.kv.events import BlockEvent, BlockFeed, Parent, Removed, Stored


class CachedBlock(NamedTuple):
    """A block in the index and the uid of its contents."""

    block: int
    uid: int


def token_key(token_ids: Sequence[int]) -> bytes:
    """The tokens of one block as the bytes the index is keyed by."""
    return array("i", token_ids).tobytes()


def root_of(tenant: str, salt: str = "") -> str:
    """What the first block of a prompt hangs from: prompts of different tenants or salts share nothing."""
    return f"{tenant}\0{salt}" if salt else tenant


class PrefixIndex:
    """Maps block contents to blocks; holds no references and no token lists."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Parent, bytes], CachedBlock] = {}
        self._keys: dict[int, tuple[Parent, bytes]] = {}
        self._last_uid = 0
        self._feeds: list[BlockFeed] = []

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, parent: Parent, tokens: bytes) -> CachedBlock | None:
        """The entry holding `tokens` after `parent`."""
        return self._entries.get((parent, tokens))

    def insert(self, parent: Parent, tokens: bytes, block: int) -> CachedBlock:
        """Name the contents of `block`. The key must be absent and the block unnamed."""
        key = (parent, tokens)
        if key in self._entries or block in self._keys:
            raise ValueError(f"block {block} or its contents are in the index already")
        self._last_uid += 1
        entry = self._entries[key] = CachedBlock(block, self._last_uid)
        self._keys[block] = key
        if self._feeds:
            self._tell(Stored(parent, tokens, entry.uid))
        return entry

    def evict(self, block: int) -> None:
        """Forget the contents of `block`, which must be in the index."""
        entry = self._entries.pop(self._keys.pop(block))
        if self._feeds:
            self._tell(Removed(entry.uid))

    def blocks(self) -> list[int]:
        """The blocks in the index."""
        return list(self._keys)

    def blocks_of(self, tenant: str) -> list[int]:
        """The blocks that a prompt of `tenant` can find, with any salt; parents before children."""
        uids, salted = set[Parent]({tenant}), root_of(tenant, "?")[:-1]
        blocks = []
        for (parent, _), entry in self._entries.items():  # in the order of insertion, so a parent comes first
            if parent in uids or (isinstance(parent, str) and parent.startswith(salted)):
                uids.add(entry.uid)
                blocks.append(entry.block)
        return blocks

    def follow(self, feed: BlockFeed) -> list[Stored]:
        """Tell `feed` what changes from now on; returns what is there, parents before children."""
        self._feeds.append(feed)
        return [Stored(parent, tokens, entry.uid) for (parent, tokens), entry in self._entries.items()]

    def _tell(self, event: BlockEvent) -> None:
        self._feeds = [feed for feed in self._feeds if feed.put(event)]
