"""Calls: the calls that produce output, over every interface of a server.

Shutdown waits for them, they share the turns of the event loop, and the pace at which they end tells a refused
client when to try again.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from engine.engine import Engine
from engine.errors import EngineStopped
from rpc.auth import TENANT
from rpc.clock import Clock
from rpc.pace import Pace
from rpc.turnstile import Turnstile

WRITERS_PER_TURN = 8
"""Messages of output in one turn of the event loop: 0.4 ms, by which a step of the engine is late at most."""


class Calls:
    """Counts live calls.

    Attributes:
        pace: told by whoever submits that a request has left the engine.
        turnstile: passed by whoever reads output to write it.
    """

    def __init__(self, clock: Clock) -> None:
        self.pace = Pace(clock)
        self.turnstile = Turnstile(WRITERS_PER_TURN)
        self._live = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no call is live."""
        await self._idle.wait()

    @contextmanager
    def live(self) -> Iterator[None]:
        """A call is live for as long as the block runs."""
        self._live += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._live -= 1
            if self._live == 0:
                self._idle.set()


def own_id(request_id: str) -> str:
    """The id under which the engine knows a request of the calling tenant."""
    return f"{TENANT.get()}/{request_id}" if TENANT.get() else request_id


def serving(engine: Engine) -> Engine:
    """`engine`, if it takes work. Raises EngineStopped."""
    if engine.state != "serving":
        raise EngineStopped(f"the engine is {engine.state}")
    return engine


def loaded(engine: Engine) -> Engine:
    """`engine`, also while draining: live requests can be looked at until the end. Raises EngineStopped."""
    if engine.state == "starting":
        raise EngineStopped("the engine is starting")
    return engine
