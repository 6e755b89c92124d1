"""What a request takes from the prefix cache when it gets in, and what it waits for."""

import pytest

from engine.schedule.sequence import Status
from tests.engine.fake_device import expected
from tests.engine.server import serving, tokens_of
from tests.schedule.rig import Rig


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_the_same_prompt_twice(length: int, cached: int) -> None:
    """K05: hits are whole blocks and at least the last token is computed."""
    rig = Rig(budget=64, block_size=16)
    prompt = [(7 * i) % 50 for i in range(length)]
    first = rig.add(prompt, 3)
    rig.run()
    second = rig.add(prompt, 3)
    rig.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
    rig.check_outputs()


def test_two_equal_prompts_in_one_step_the_second_waits_and_then_hits() -> None:
    """It must not "hit" blocks that the first has not computed, and need not compute them again."""
    rig = Rig(budget=64)
    a, b = rig.add(range(9), 4), rig.add(range(9), 4)
    step = rig.iterate()
    assert step is not None and [e.sequence for e in step.entries] == [a]
    assert b.status is Status.WAITING
    rig.run()
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)
    rig.check_outputs()


def test_waiting_for_a_prefix_holds_up_nobody_else() -> None:
    rig = Rig(budget=8, max_num_seqs=4)
    rig.add(range(32), 1)
    same = [rig.add(range(32), 1) for _ in range(20)]
    other = rig.add([9] * 3, 1)
    while other.status is Status.WAITING:
        rig.iterate()
    assert all(s.status is Status.WAITING for s in same)
    rig.run()
    assert {s.num_cached_tokens for s in same} == {28}
    rig.check_outputs()


def test_waiting_ends_when_the_one_that_computes_is_aborted() -> None:
    rig = Rig(budget=8)
    a, b = rig.add(range(32), 1), rig.add(range(32), 1)
    rig.iterate()
    rig.roster.finish(a)
    rig.run()
    assert b in rig.finished
    rig.check_outputs()


def test_generated_tokens_are_reused() -> None:
    rig = Rig()
    first = rig.add(range(4), 9)
    rig.run()
    turn = rig.add([*first.token_ids, 5], 2)
    rig.run()
    assert turn.num_cached_tokens == 12
    rig.check_outputs()


def test_cached_tokens_are_counted_when_the_request_gets_in() -> None:
    """K12: a hit that was seen while there was no room, and evicted since, is not relied on."""
    rig = Rig(num_blocks=8, budget=64)
    prompt = list(range(8))
    rig.add(prompt, 1)
    rig.run()
    rig.add([50] * 20, 9)
    late = rig.add([*prompt, *range(8, 15)], 2)
    rig.iterate()
    assert late.status is Status.WAITING and rig.roster.kv.match(late.token_ids, "")[0]
    while late.status is Status.WAITING:
        rig.iterate()
    rig.run()
    assert late.num_cached_tokens == 4, "the second of its two blocks was evicted"
    rig.check_outputs()


def test_prompt_logprobs_skip_the_look_up_but_store() -> None:
    rig = Rig()
    rig.add(range(9), 1)
    rig.run()
    s = rig.add(range(9), 1, prompt_logprobs=0)
    rig.run()
    assert s.num_cached_tokens == 0
    targets = rig.device.plans[-1].prompt_targets
    assert targets is not None and targets.tolist() == [*range(1, 9), -1]


def test_salts_part_the_prefixes_of_one_tenant() -> None:
    """Also from one whose name is the salt, and from no salt; each finds its own."""
    places = [("a", "x"), ("a", ""), ("a", "y"), ("", "a"), ("", "x"), ("x", "")]
    rig = Rig(budget=64)
    for tenant, salt in places:
        first = rig.add(range(9), 1, tenant=tenant, cache_salt=salt)
        rig.run()
        again = rig.add(range(9), 1, tenant=tenant, cache_salt=salt)
        rig.run()
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 8)


def test_resetting_a_tenant_forgets_its_prefixes_of_every_salt() -> None:
    rig = Rig(budget=64)
    places = [("a", ""), ("a", "x"), ("ab", ""), ("", "x")]
    for tenant, salt in places:
        rig.add(range(9), 1, tenant=tenant, cache_salt=salt)
    rig.run()
    rig.roster.kv.reset_prefix_cache("a")
    again = [rig.add(range(9), 1, tenant=tenant, cache_salt=salt) for tenant, salt in places]
    rig.run()
    assert [s.num_cached_tokens for s in again] == [0, 0, 8, 8]


def test_tenants_do_not_share_cached_prefixes() -> None:
    rig = Rig()
    rig.add(range(9), 1, tenant="a")
    rig.run()
    other, same = rig.add(range(9), 1, tenant="b"), rig.add(range(9), 1, tenant="a")
    rig.run()
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 8)


def test_nobody_waits_for_a_block_of_another_tenant() -> None:
    """It could not be hit, and the wait would tell what the other asks."""
    rig = Rig(budget=64)
    first, second = rig.add(range(9), 2, tenant="a"), rig.add(range(9), 2, tenant="b")
    rig.iterate()
    assert first.status is second.status is Status.RUNNING
    rig.run()
    rig.check_outputs()


async def test_who_waits_for_the_last_blocks_in_flight_joins_the_step_that_follows() -> None:
    """The step in flight is settled first then, but not while the steps of the one that computes are full."""
    async with serving(budget=8, free_running=False) as server:
        prompts = [[*range(1, 17), 30 + i, 40] for i in range(3)]
        streams = [server.generate(prompt, 2) for prompt in prompts]
        await server.until(lambda: len(server.device.plans) == 2)
        assert server.device.opened == 0, "the second step is launched while the first is in flight"
        server.device.open(99)
        assert [await tokens_of(stream) for stream in streams] == [expected(prompt, 2) for prompt in prompts]
        assert [plan.num_tokens.tolist() for plan in server.device.plans[:3]] == [[8], [8], [2, 2, 2]]
