"""Watchdog: notices an engine that has work and makes no iteration.

It runs as a task beside the engine's, so it sees a device that never answers; something that blocks
the event loop itself stops the health service with it, whose checks then time out.
"""

import logging
from collections.abc import Awaitable, Callable

from engine.engine import Engine
from rpc.clock import Clock

logger = logging.getLogger(__name__)

LOOKS_PER_LIMIT = 4


class Watchdog:
    """Reports False when the engine has stood still for `seconds`, and True when it moves again."""

    def __init__(self, engine: Engine, seconds: float, clock: Clock) -> None:
        self._engine = engine
        self._seconds = seconds
        self._clock = clock

    async def watch(self, report: Callable[[bool], Awaitable[None]]) -> None:
        """Look on until cancelled; `report` is called at every change."""
        seen, since, moves = -1, self._clock.now(), True
        while True:
            if self._engine.num_iterations != seen or not self._engine.has_work:
                seen, since = self._engine.num_iterations, self._clock.now()
            moved = self._clock.now() - since < self._seconds
            if moved != moves:
                moves = moved
                logger.error("the engine %s", "moves again" if moves else f"has stood still for {self._seconds:g} s")
                await report(moves)
            await self._clock.sleep(self._seconds / LOOKS_PER_LIMIT)
