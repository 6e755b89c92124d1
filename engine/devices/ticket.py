"""FutureTicket: a step in flight whose result arrives in the loop's thread. Implements `protocol.Ticket`."""

import asyncio

from engine.plan import StepResult


class FutureTicket:
    """Resolves with the future; the device keeps the other end."""

    def __init__(self, future: asyncio.Future[StepResult]) -> None:
        self._future = future
        future.add_done_callback(_retrieve)

    def done(self) -> bool:
        return self._future.done()

    async def result(self) -> StepResult:
        return await asyncio.shield(self._future)  # a cancelled waiter must not cancel the step


def _retrieve(future: asyncio.Future[StepResult]) -> None:
    """A ticket nobody waits for any more is not an error to be logged."""
    if not future.cancelled():
        future.exception()
