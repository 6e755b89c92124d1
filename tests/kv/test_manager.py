"""KVManager: matching, leases and adoption against a naive model of what is cached."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.groups import KVGroup, kv_groups
from engine.kv.manager import BlockTable, KVManager
from engine.plan import BlockCopy

GROUPS = (KVGroup(None, (0,)), KVGroup(8, (1,)))
BLOCK = 4


def make(num_blocks: int = 8, groups: tuple[KVGroup, ...] = GROUPS, caching: bool = True) -> KVManager:
    return KVManager(groups, num_blocks, BLOCK, enable_prefix_caching=caching)


def begin(kv: KVManager, tokens: list[int], root: str = "") -> list[BlockTable]:
    tables = kv.begin(kv.match(tokens, root), len(tokens), root)
    assert tables is not None
    return tables


def lease_of(tables: list[BlockTable]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.blocks) for t in tables)


def compute_and_release(kv: KVManager, tokens: list[int], root: str = "") -> None:
    tables = begin(kv, tokens, root)
    given_up = kv.index(tables, tokens, len(tokens))
    if given_up is not None:
        kv.release(given_up)
    kv.release(kv.detach(tables))


def hits(kv: KVManager, tokens: list[int], root: str = "") -> int:
    runs = kv.match(tokens, root)
    assert len({len(run) for run in runs}) == 1
    return len(runs[0])


def test_layers_are_grouped_by_window() -> None:
    assert kv_groups([None, 4, None, 4, 8]) == (KVGroup(None, (0, 2)), KVGroup(4, (1, 3)), KVGroup(8, (4,)))


def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute() -> None:
    kv = make()
    compute_and_release(kv, list(range(12)))
    assert [hits(kv, list(range(n))) for n in (3, 4, 5, 8, 9, 11, 12)] == [0, 0, 1, 1, 2, 2, 2]
    assert hits(kv, [*range(12), 99]) == 3
    assert hits(kv, [0, 1, 2, 99, 4, 5, 6, 7, 8]) == 0


def test_equal_tokens_behind_different_parents_do_not_match() -> None:
    kv = make()
    compute_and_release(kv, [1, 1, 1, 1, 5, 6, 7, 8])
    assert hits(kv, [2, 2, 2, 2, 5, 6, 7, 8, 9]) == 0
    assert hits(kv, [5, 6, 7, 8, 9]) == 0


def test_the_root_isolates() -> None:
    kv = make()
    compute_and_release(kv, list(range(8)), root="a")
    assert hits(kv, list(range(9)), root="a") == 2
    assert hits(kv, list(range(9)), root="b") == 0
    assert hits(kv, list(range(9))) == 0


def test_a_recycled_parent_makes_no_false_hit() -> None:
    """The uid names contents: after the parent's block is recycled, its child is unreachable."""
    kv = make(num_blocks=2, groups=(KVGroup(None, (0,)),))
    compute_and_release(kv, [1, 1, 1, 1, 2, 2, 2, 2])
    # Takes both blocks, the parent's included, and caches one other content at the root.
    compute_and_release(kv, [3, 3, 3, 3, 4])
    compute_and_release(kv, [1, 1, 1, 1, 9])
    assert hits(kv, [1, 1, 1, 1, 2, 2, 2, 2, 0]) == 1


def test_duplicates_adopt_the_existing_block() -> None:
    kv = make()
    tokens = list(range(8))
    first, second = begin(kv, tokens), begin(kv, tokens)
    assert not set(first[0].blocks) & set(second[0].blocks)
    for table in second:
        table.num_sent = 2
    assert kv.index(first, tokens, 8) is None
    own = lease_of(second)
    given_up = kv.index(second, tokens, 8)
    assert given_up == own
    assert lease_of(second) == lease_of(first)
    assert [t.num_sent for t in second] == [0, 0]
    assert kv.audit([lease_of(first), lease_of(second), given_up]) == []
    kv.release(given_up)
    kv.release(kv.detach(first))
    kv.release(kv.detach(second))
    assert kv.audit([]) == []
    assert hits(kv, [*tokens, 0]) == 2


def test_what_does_not_fit_changes_nothing() -> None:
    kv = make(num_blocks=3)
    tables = begin(kv, list(range(8)))
    assert kv.begin([[], []], 8, "") is None
    assert kv.grow(tables, 13, write_from=8) is None
    assert kv.num_available == 1
    assert kv.grow(tables, 12, write_from=8) == []
    assert kv.num_available == 0


def test_who_writes_to_a_shared_block_gets_a_copy() -> None:
    kv = make()
    tokens = list(range(6))
    first = begin(kv, tokens)
    for table in first:
        table.num_sent = 2
    second = kv.fork(first)
    assert lease_of(first) == lease_of(second)
    copies = kv.grow(first, 7, write_from=6)
    assert copies == [BlockCopy(g, second[g].blocks[1], first[g].blocks[1]) for g in range(2)]
    assert [t.blocks[0] for t in first] == [t.blocks[0] for t in second]
    assert [t.num_sent for t in first] == [1, 1]
    assert kv.grow(second, 7, write_from=6) == [], "the last holder writes in place"
    assert kv.audit([lease_of(first), lease_of(second)]) == []


def test_a_copy_needs_a_block_too() -> None:
    kv = make(num_blocks=2)
    first = begin(kv, list(range(6)))
    kv.fork(first)
    assert kv.grow(first, 7, write_from=6) is None


def test_matched_blocks_without_holders_count_as_taken() -> None:
    """Reviving a cached block uses one of the available ones."""
    kv = make(num_blocks=3, groups=(KVGroup(None, (0,)),))
    compute_and_release(kv, list(range(8)))
    assert kv.begin(kv.match(list(range(17)), ""), 17, "") is None
    assert kv.begin(kv.match(list(range(12)), ""), 12, "") is not None


def test_reset_forgets_but_keeps_what_is_in_use() -> None:
    kv = make()
    tokens = list(range(9))
    tables = begin(kv, tokens)
    kv.index(tables, tokens, 8)
    kv.reset_prefix_cache()
    assert hits(kv, tokens) == 0
    assert kv.audit([lease_of(tables)]) == []
    kv.release(kv.detach(tables))
    assert kv.audit([]) == []


def test_no_caching_never_hits() -> None:
    kv = make(caching=False)
    compute_and_release(kv, list(range(8)))
    assert hits(kv, list(range(9))) == 0


def test_the_audit_sees_a_lost_and_a_double_reference() -> None:
    kv = make()
    tables = begin(kv, list(range(8)))
    assert kv.audit([]) != []
    assert kv.audit([lease_of(tables), lease_of(tables)]) != []


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=12))
def test_matches_what_was_computed_and_nothing_else(prompts: list[list[int]]) -> None:
    """With room for everything, the hits are the longest shared run of whole blocks ever computed."""
    kv = make(num_blocks=64)
    seen: list[list[int]] = []
    for tokens in prompts:
        limit = (len(tokens) - 1) // BLOCK
        shared = [
            max(n for n in range(limit + 1) if old[: n * BLOCK] == tokens[: n * BLOCK] and n * BLOCK <= len(old))
            for old in seen
        ]
        assert hits(kv, tokens) == max(shared, default=0)
        compute_and_release(kv, tokens)
        assert kv.audit([]) == []
        seen.append(tokens)


# -- counts: of the scarcest group ---------------------------------------------------------------


def test_counts_are_of_the_group_that_has_least() -> None:
    kv = make()
    compute_and_release(kv, list(range(8)))
    assert (kv.num_available, kv.num_cached, kv.usage) == (8, 2, 0.0)
    for n in range(1, 5):  # blocks that group 1 alone has lost
        kv._pools[1].take()
        assert (kv.num_available, kv.usage) == (8 - n, n / 8)
    assert kv.num_cached == 2
    for _ in range(3):
        kv._pools[1].take()
    assert (kv.num_available, kv.num_cached, kv.usage) == (1, 1, 0.875), "one that was cached was taken"


def test_what_does_not_fit_in_one_group_does_not_fit() -> None:
    kv = make(num_blocks=4)
    kv._pools[1].take()
    assert kv.begin([[], []], 4 * BLOCK, "") is None
    tables = kv.begin([[], []], 2 * BLOCK, "")
    assert tables is not None
    assert kv.grow(tables, 4 * BLOCK, write_from=2 * BLOCK) is None
    assert kv.grow(tables, 3 * BLOCK, write_from=2 * BLOCK) == []
    assert lease_of(tables)[0] != () and len(lease_of(tables)[1]) == 3


def test_blocks_are_freed_with_the_last_of_their_holders() -> None:
    kv = make()
    first = begin(kv, list(range(6)))
    second = kv.fork(first)
    kv.grow(second, 10, write_from=6)  # a copy of the last block, and one more
    assert kv.num_freed_with([first]) == 1
    assert kv.num_freed_with([second]) == 2
    assert kv.num_freed_with([first, second]) == 4
    kv._pools[1].share(second[1].blocks[2])
    assert kv.num_freed_with([second]) == 1
    assert kv.num_freed_with([]) == 0


def test_pages_are_counted_where_tables_change() -> None:
    kv = make(num_blocks=16)
    tables = begin(kv, list(range(6)))
    assert (kv.num_pages, [kv.blocks_for(n) for n in (0, 1, 4, 5)]) == (2, [0, 1, 1, 2])
    kv.grow(tables, 7, write_from=6)
    assert kv.num_pages == 2
    kv.grow(tables, 13, write_from=6)
    assert kv.num_pages == 4
    forked = kv.fork(tables)
    assert kv.num_pages == 8
    kv.release(kv.detach(tables))
    assert kv.num_pages == 4
    kv.release(kv.detach(forked))
    assert (kv.num_pages, kv.detach([])) == (0, ())
    compute_and_release(kv, list(range(8)))
    begin(kv, list(range(9)))  # two of its three blocks are hits
    assert kv.num_pages == 3


def test_hits_count_as_indexed_and_hang_from_the_last() -> None:
    kv = make()
    compute_and_release(kv, list(range(8)))
    runs = kv.match(list(range(9)), "")
    tables = kv.begin(runs, 9, "")
    assert tables is not None
    assert [(t.num_indexed, t.parent) for t in tables] == [(2, run[-1].uid) for run in runs]
    assert [(t.num_indexed, t.parent) for t in begin(kv, [5] * 5, "root")] == [(0, "root")] * 2
    forked = kv.fork(tables)
    assert [(t.num_indexed, t.parent, t.num_sent) for t in forked] == [(t.num_indexed, t.parent, 0) for t in tables]


def test_only_full_blocks_are_indexed_and_once() -> None:
    kv = make()
    tokens = list(range(11))
    tables = begin(kv, tokens)
    for computed, indexed in ((3, 0), (4, 1), (7, 1), (8, 2), (8, 2), (11, 2)):
        assert kv.index(tables, tokens, computed) is None
        assert [t.num_indexed for t in tables] == [indexed] * 2
    assert hits(kv, [*tokens, 0]) == 2
    without = make(caching=False)
    tables = begin(without, tokens)
    assert without.index(tables, tokens, 11) is None and [t.num_indexed for t in tables] == [0, 0]
    assert kv.index([], tokens, 11) is None


def test_a_shared_block_is_named_again_behind_a_parent_that_is_known() -> None:
    """One choice names it behind a block that a reset has forgotten; the other, which named neither, comes after."""
    kv = make()
    tokens = list(range(8))
    first = begin(kv, tokens)
    second = kv.fork(first)
    kv.index(first, tokens, 4)
    kv.reset_prefix_cache()
    kv.index(first, tokens, 8)
    assert hits(kv, [*tokens, 0]) == 0
    kv.index(second, tokens, 8)
    assert hits(kv, [*tokens, 0]) == 2
    assert kv.audit([lease_of(first), lease_of(second)]) == []


def test_who_adopts_a_block_tells_the_device_from_there() -> None:
    kv = make(num_blocks=12)
    tokens = list(range(12))
    first, second = begin(kv, tokens[:8]), begin(kv, tokens)
    kv.index(first, tokens, 4)
    kv.index(second, tokens, 4)
    for table in second:
        table.num_sent = 3
    kv.index(first, tokens, 8)
    assert kv.index(second, tokens, 8) is not None
    assert [t.num_sent for t in second] == [1, 1]
    for table in second:
        table.num_sent = 0
    kv.index(second, tokens, 12)
    assert [t.num_sent for t in second] == [0, 0], "it had the block by itself"


def test_a_copy_is_told_from_its_page() -> None:
    kv = make()
    first = begin(kv, list(range(10)))
    for table in first:
        table.num_sent = 1
    kv.fork(first)
    kv.grow(first, 11, write_from=10)
    assert [t.num_sent for t in first] == [1, 1], "what the device did not know it does not know now"


def test_the_tail_of_a_lease_is_reused_before_its_head() -> None:
    kv = make(num_blocks=3, groups=GROUPS[:1])
    compute_and_release(kv, list(range(12)))
    tables = kv.begin([[]], 4, "")
    assert tables is not None
    assert [hits(kv, list(range(n))) for n in (5, 9, 13)] == [1, 2, 2]


def test_the_audit_says_what_is_wrong() -> None:
    kv = make(num_blocks=4)
    tables = begin(kv, list(range(5)))
    block = tables[1].blocks[0]
    assert kv.audit([lease_of(tables)]) == []
    kv._pools[1].share(block)
    assert kv.audit([lease_of(tables)]) == [f"group 1: block {block} has 2 references, 1 holders"]
    kv._pools[1].give(block)
    kv._pools[0].mark_cached(3, True)
    assert kv.audit([lease_of(tables)]) == ["group 0: the index and the pool disagree on what is cached"]
    kv._pools[0].mark_cached(3, False)
    kv._pools[0].num_cached += 1
    assert kv.audit([lease_of(tables)]) == ["group 0: 1 blocks are counted as cached"]
    kv._pools[0].num_cached -= 1
    kv._pools[1].num_available -= 1
    assert kv.audit([lease_of(tables)]) == ["group 1: the free list does not hold the blocks without holders"]
    kv._pools[1].num_available += 1
    kv.release(((), (block,)))
    assert kv.audit([lease_of(tables)]) == [
        f"group 1: block {block} has 0 references, 1 holders",
        "group 1: the free list does not hold the blocks without holders",
    ]


def test_the_audit_sees_a_lease_of_the_wrong_block() -> None:
    kv = make(num_blocks=4, groups=GROUPS[:1])
    (table,) = begin(kv, [1, 2])
    other = (table.blocks[0] + 1) % 4
    problems = kv.audit([((other,),)])
    assert "group 0: the free list does not hold the blocks without holders" in problems and len(problems) == 3


def test_states_are_of_each_group() -> None:
    kv = make(num_blocks=4)
    tables = begin(kv, list(range(5)))
    kv._pools[1].share(tables[1].blocks[1])
    first, second = (states.tolist() for states in kv.block_states())
    assert sorted(first) == [0, 0, 2, 2] and sorted(second) == [0, 0, 2, 3]


def test_resetting_one_tenant_keeps_the_others() -> None:
    kv = make()
    for tenant in ("a", "b"):
        compute_and_release(kv, list(range(4)), root=tenant)
    kv.reset_prefix_cache("a")
    assert [hits(kv, list(range(5)), tenant) for tenant in ("a", "b")] == [0, 1]
    assert kv.audit([]) == []
    assert kv.num_cached == 1
