"""Block events against a naive model: who follows them knows at every moment what a prompt would find."""

import struct
from collections.abc import Sequence
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.events import BlockFeed, BlockNames, Removed, Stored
from engine.kv.manager import KVManager
from engine.kv.prefix import PrefixIndex
from tests.kv.test_manager import BLOCK, begin, compute_and_release, hits, make

ROOTS = ("", "acme")


class Follower:
    """Keeps the names of the blocks of one root."""

    def __init__(self, kv: KVManager, root: str, capacity: int = 1 << 16) -> None:
        self.num_wakes = 0
        self.feed = BlockFeed(capacity, self._wake)
        self.blocks = BlockNames(root)
        self.names: list[int] = []
        self._apply(kv.follow(self.feed))

    def read(self) -> set[int]:
        self._apply(self.feed.take())
        assert len(set(self.names)) == len(self.names)
        return set(self.names)

    def _apply(self, events: Sequence[Stored | Removed]) -> None:
        for event in events:
            if isinstance(event, Stored):
                name = self.blocks.store(event)
                self.names += [] if name is None else [name]
            elif (name := self.blocks.remove(event)) is not None:
                self.names.remove(name)

    def _wake(self) -> None:
        self.num_wakes += 1


def names_of(tokens: Sequence[int], num_blocks: int, root: str) -> list[int]:
    digest, names = blake2b(root.encode(), digest_size=8).digest(), []
    for i in range(num_blocks):
        block = struct.pack(f"<{BLOCK}i", *tokens[i * BLOCK : (i + 1) * BLOCK])
        digest = blake2b(digest + block, digest_size=8).digest()
        names.append(int.from_bytes(digest, "little", signed=True))
    return names


@pytest.mark.parametrize(("root", "expected"), [("", "b6d5da731ce2d97b"), ("acme", "edf18983eaaeee35")])
def test_names_are_the_same_in_every_process(root: str, expected: str) -> None:
    """As coreutils' `b2sum -l 64` has them: over the sum of the root and then tokens 1 to 4, little-endian int32."""
    names = BlockNames(root)
    name = names.store(Stored(root, struct.pack("<4i", 1, 2, 3, 4), 7))
    assert name is not None and name.to_bytes(8, "little", signed=True).hex() == expected
    assert names.name(7) == name


Step = tuple[str, list[int], str]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["compute"] * 6 + ["reset", "reset all", "join"]),
        st.lists(st.integers(0, 1), min_size=BLOCK, max_size=4 * BLOCK),
        st.sampled_from(ROOTS),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_a_follower_knows_what_a_prompt_would_find(steps: list[Step]) -> None:
    """A small pool, so that blocks are evicted; followers join in the middle; each sees its own root only."""
    kv = make(num_blocks=6, groups=make().groups[:1])
    followers = {root: [Follower(kv, root)] for root in ROOTS}
    prompts: set[tuple[str, tuple[int, ...]]] = set()
    for kind, tokens, root in steps:
        match kind:
            case "compute":
                compute_and_release(kv, tokens, root)
                prompts.add((root, tuple(tokens)))
            case "join":
                followers[root].append(Follower(kv, root))
            case "reset":
                before = {(r, t): hits(kv, [*t, 9], r) for r, t in prompts}
                kv.reset_prefix_cache(root)
                assert all(hits(kv, [*t, 9], r) == (r != root) * n for (r, t), n in before.items())
            case "reset all":
                kv.reset_prefix_cache()
        for root_ in ROOTS:
            known = {n for r, t in prompts if r == root_ for n in names_of(t, hits(kv, [*t, 9], r), r)}
            assert all(follower.read() == known for follower in followers[root_])


def test_contents_that_no_prompt_can_find_are_not_told() -> None:
    """A sequence that began before a reset goes on naming its blocks, behind a parent that is forgotten."""
    kv = make()
    tokens = list(range(9))
    tables = begin(kv, tokens)
    kv.index(tables, tokens, 4)
    follower = Follower(kv, "")
    assert len(follower.read()) == 1
    kv.reset_prefix_cache()
    kv.index(tables, tokens, 8)
    assert hits(kv, tokens) == 0 and follower.read() == set()


def test_one_that_does_not_read_is_cut_off_and_says_so() -> None:
    kv = make(num_blocks=8)
    slow, fast = Follower(kv, "", capacity=2), Follower(kv, "")
    compute_and_release(kv, list(range(12)))
    assert slow.feed.overflowed and slow.feed.closed and slow.feed.take() == []
    assert not fast.feed.closed and len(fast.read()) == 3
    assert slow.num_wakes == 3  # two events and the end


def test_a_closed_feed_is_told_nothing_more() -> None:
    kv = make()
    follower = Follower(kv, "")
    follower.feed.close()
    compute_and_release(kv, list(range(8)))
    assert follower.read() == set() and not follower.feed.overflowed and follower.num_wakes == 1


def test_a_feed_that_takes_no_more_says_so_and_is_forgotten() -> None:
    index, news = PrefixIndex(), list[int]()
    feed = BlockFeed(1, lambda: news.append(1))
    index.follow(feed)
    index.insert("", b"a", 0)
    assert feed.put(Removed(1)) is False and feed.overflowed and feed.closed
    assert feed.put(Removed(1)) is False
    assert (feed.take(), len(news)) == ([], 2)
    index.insert("", b"b", 1)
    assert index._feeds == []
