"""Clock: the time that the server's own timers go by, so that tests can run them in virtual time."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Reads the time and waits for it to pass, both in seconds."""

    def now(self) -> float:
        """Time since some fixed moment."""

    async def sleep(self, seconds: float) -> None:
        """Return when so much time has passed."""


class MonotonicClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        """Time since some fixed moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return when so much time has passed."""
        await asyncio.sleep(seconds)
