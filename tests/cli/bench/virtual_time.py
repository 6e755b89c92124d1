"""VirtualTime: a clock and a sleep for one event loop; time passes when nothing else can happen."""

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_TURNS = 20
"""Turns of the loop after which nothing that needs no time is left to happen."""


class VirtualTime:
    """Starts at 50 s."""

    def __init__(self) -> None:
        self.now = 50.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, id(woken), woken))
        await woken

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Let time pass until `work` is done."""
        task = asyncio.create_task(work)
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            due, _, woken = heapq.heappop(self._sleepers)
            self.now = max(self.now, due)
            if not woken.done():
                woken.set_result(None)
