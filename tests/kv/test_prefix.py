"""PrefixIndex by itself: names of contents, and whose they are."""

import pytest

from engine.kv.prefix import CachedBlock, PrefixIndex, root_of, token_key


def test_contents_have_one_block_and_a_block_one_name() -> None:
    index = PrefixIndex()
    entry = index.insert("", b"a", 3)
    assert (entry, index.find("", b"a"), index.find("x", b"a"), len(index)) == (CachedBlock(3, 1), entry, None, 1)
    for tokens, block in ((b"a", 4), (b"b", 3), (b"a", 3)):
        with pytest.raises(ValueError, match=f"block {block} or its contents are in the index already"):
            index.insert("", tokens, block)
    index.evict(3)
    assert (index.find("", b"a"), index.blocks(), len(index)) == (None, [], 0)
    assert index.insert("", b"a", 3).uid == 2, "a uid is used once"


def test_a_tenants_blocks_are_those_under_its_roots_of_any_salt() -> None:
    index = PrefixIndex()
    roots = [root_of("acme"), root_of("acme", "s1"), root_of("acme", "s2"), root_of("acme2"), root_of("beta", "s1"), ""]
    firsts = [index.insert(root, b"a", block) for block, root in enumerate(roots)]
    for block, first in enumerate(firsts, 10):
        index.insert(first.uid, b"b", block)
    assert index.blocks_of("acme") == [0, 1, 2, 10, 11, 12]
    assert index.blocks_of("acme2") == [3, 13]
    assert index.blocks_of("beta") == [4, 14]
    assert index.blocks_of("") == [5, 15]
    assert index.blocks_of("other") == []


def test_ids_are_keyed_by_all_their_bits() -> None:
    assert token_key([1, 256]) != token_key([1, 0]) and len(token_key([1, 2, 3])) == 12
