"""Turnstile: so many per turn of the event loop, in order of arrival, and none lost."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rpc.turnstile import Turnstile


class Crowd:
    """Tasks that pass a turnstile, and who passed in which turn."""

    def __init__(self, width: int) -> None:
        self.turnstile = Turnstile(width)
        self.passed: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    def come(self, count: int) -> None:
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._enter(len(self.tasks))))

    async def _enter(self, name: int) -> None:
        await self.turnstile.enter()
        self.passed.append(name)

    async def turn(self) -> list[int]:
        """Who passes in the next turn of the loop."""
        before = len(self.passed)
        await asyncio.sleep(0)
        return self.passed[before:]


async def test_few_pass_at_once() -> None:
    crowd = Crowd(3)
    crowd.come(3)
    assert await crowd.turn() == [0, 1, 2]
    for _ in range(5):
        await crowd.turn()
    crowd.come(3)
    assert await crowd.turn() == [3, 4, 5], "the turns between were nobody's"


async def test_the_others_stand_in_line() -> None:
    crowd = Crowd(2)
    crowd.come(5)
    turns = [await crowd.turn() for _ in range(8)]
    assert [t for t in turns if t] == [[0, 1], [2, 3], [4]]


async def test_who_comes_later_does_not_overtake() -> None:
    crowd = Crowd(2)
    crowd.come(4)
    assert await crowd.turn() == [0, 1]
    crowd.come(2)
    turns = [await crowd.turn() for _ in range(8)]
    assert [t for t in turns if t] == [[2, 3], [4, 5]]


async def test_who_leaves_the_line_takes_no_place() -> None:
    crowd = Crowd(1)
    crowd.come(4)
    await crowd.turn()
    crowd.tasks[1].cancel()
    crowd.tasks[2].cancel()
    turns = [await crowd.turn() for _ in range(8)]
    assert [t for t in turns if t] == [[3]]


@given(st.integers(1, 4), st.lists(st.integers(0, 6), max_size=8))
def test_everybody_passes_in_order_and_few_in_any_number_of_turns(width: int, arrivals: list[int]) -> None:
    """A turn of the test's task begins within one of the turnstile's: n of the first touch n + 1 of the second."""

    async def run() -> None:
        crowd, passed = Crowd(width), list[int]()
        for count in [*arrivals, *[0] * (3 * sum(arrivals))]:
            crowd.come(count)
            passed.append(len(await crowd.turn()))
        assert crowd.passed == list(range(sum(arrivals)))
        for start in range(len(passed)):
            for stop in range(start + 1, len(passed) + 1):
                assert sum(passed[start:stop]) <= (stop - start + 1) * width

    asyncio.run(run())
