"""ManualClock: time that passes when the test says so."""

import asyncio


class ManualClock:
    """`advance` wakes the sleepers that are due; `until_sleeping` waits for one to come."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self._slept = asyncio.Condition()

    @property
    def sleepers(self) -> int:
        return len(self._sleepers)

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        sleeper = (self.time + seconds, woken)
        self._sleepers.append(sleeper)
        async with self._slept:
            self._slept.notify_all()
        try:
            await woken.wait()
        finally:
            self._sleepers.remove(sleeper)

    async def until_sleeping(self, seconds: float) -> None:
        """Wait until somebody sleeps until `seconds` from now."""
        due = self.time + seconds
        async with self._slept:
            await self._slept.wait_for(lambda: any(time == due for time, _ in self._sleepers))

    def advance(self, seconds: float) -> None:
        self.time += seconds
        for time, woken in self._sleepers:
            if time <= self.time:
                woken.set()
