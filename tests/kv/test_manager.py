"""KVManager: matching, leases and adoption against a naive model of what is cached."""

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
