"""Block events: what enters and leaves the prefix index, told to whoever follows it.

The index puts plain events into the `BlockFeed` of each follower and knows no hash. Names that mean
the same in every process are made by the follower, in its own time: a `BlockNames` chains a hash of
contents from the root, so it also keeps a follower to the blocks of its own tenant.
Read next: `engine/kv/prefix.py`.
"""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

Parent = int | str
"""uid of the contents before, or the root."""


class Stored(NamedTuple):
    """Contents entered the index. `tokens` as `engine.kv.prefix.token_key` makes them."""

    parent: Parent
    tokens: bytes
    uid: int


class Removed(NamedTuple):
    """Contents left the index."""

    uid: int


BlockEvent = Stored | Removed


class BlockFeed:
    """Events that one follower has not taken yet, `capacity` at most; `wake` is called when there is news.

    Attributes:
        closed: takes no more events; the index forgets it at the next one.
        overflowed: closed because the follower was too slow; what it has is incomplete.
    """

    def __init__(self, capacity: int, wake: Callable[[], None]) -> None:
        self.closed = False
        self.overflowed = False
        self._capacity = capacity
        self._wake = wake
        self._events: deque[BlockEvent] = deque()

    def put(self, event: BlockEvent) -> bool:
        """Add an event; False when the feed is closed."""
        if self.closed:
            return False
        if len(self._events) == self._capacity:
            self.overflowed = True
            self.close()
            return False
        self._events.append(event)
        self._wake()
        return True

    def take(self) -> list[BlockEvent]:
        """The events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        """Take no more events."""
        self.closed = True
        self._events.clear()
        self._wake()


class BlockNames:
    """Content hashes of the blocks under one root: 64 bits of BLAKE2b over the parent's hash and the tokens.

    The same tokens under the same root have the same name in every process.
    """

    def __init__(self, root: str) -> None:
        self._digests: dict[Parent, bytes] = {root: _digest(root.encode())}

    def store(self, event: Stored) -> int | None:
        """Name the contents, as a signed number; None when they are not under the root."""
        parent = self._digests.get(event.parent)
        if parent is None:
            return None
        digest = self._digests[event.uid] = _digest(parent + event.tokens)
        return _number(digest)

    def name(self, uid: Parent) -> int:
        """The name of contents that are there."""
        return _number(self._digests[uid])

    def remove(self, event: Removed) -> int | None:
        """Forget the contents; returns their name, None when they were not under the root."""
        digest = self._digests.pop(event.uid, None)
        return None if digest is None else _number(digest)


def _digest(contents: bytes) -> bytes:
    return blake2b(contents, digest_size=8).digest()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)
