"""Soak of the loop: random events on the fake device; nothing leaks and every stream is exact."""

import pytest

from tests.soak.world import World

EVENTS_PER_WORLD = 500


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_random_events_leak_nothing_and_change_no_stream(soak_events: int) -> None:
    """K10, K16: a new configuration every 500 events."""
    num_checked = num_preemptions = 0
    for seed in range(max(1, soak_events // EVENTS_PER_WORLD)):
        world = World(seed)
        try:
            await world.play(EVENTS_PER_WORLD)
        except BaseException as error:
            error.add_note(f"World({seed})")
            raise
        num_checked += len(world.requests)
        num_preemptions += world.server.roster.num_preemptions
    assert num_checked > soak_events // 20 and num_preemptions > 0
