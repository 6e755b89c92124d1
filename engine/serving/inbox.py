"""Inbox: the only way in. Callers leave messages, the loop's task drains them.

Bounded where it matters: a submission beyond what may wait, of all or of its tenant, is refused at once. Aborts and
controls are always taken; there is at most one abort per stream. Messages may come from any
thread, because a dropped stream's finalizer may run in any. Read next: `engine/loop.py`.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from engine.errors import EngineStopped, OverCapacity
from engine.serving.live_request import LiveRequest
from loader.errors import shown


class Submit(NamedTuple):
    """A request to serve, and when it came."""

    live: LiveRequest
    arrival: float


class Abort(NamedTuple):
    """Drop a request, if it is still there."""

    request_id: str


class Control(NamedTuple):
    """Run `action` in the loop's task, between iterations, and reply with its result."""

    action: Callable[[], Any]
    reply: asyncio.Future[Any]

    def run(self) -> None:
        """Run the action and reply, unless whoever asked has gone."""
        try:
            result = self.action()
        except Exception as error:
            if not self.reply.done():
                self.reply.set_exception(error)
        else:
            if not self.reply.done():
                self.reply.set_result(result)


class Inbox:
    """Created on the event loop that will drain it.

    Attributes:
        waiting: sequences of each tenant that wait in the scheduler, published by the loop.
    """

    def __init__(
        self,
        max_queued_requests: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        max_queued_requests_per_tenant: int | None = None,
    ) -> None:
        self.waiting: Mapping[str, int] = {}
        self._clock = clock
        self._max_queued = max_queued_requests
        self._max_queued_per_tenant = max_queued_requests_per_tenant
        self._end = ""
        self._messages: deque[Submit | Abort | Control] = deque()
        self._submitted: Counter[str] = Counter()
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @property
    def num_messages(self) -> int:
        """Messages that nobody has taken yet."""
        return len(self._messages)

    def submit(self, live: LiveRequest) -> None:
        """Queue a request. Raises OverCapacity when too many wait, or too many of its tenant; EngineStopped."""
        self._check_open()
        queued = sum(self.waiting.values()) + self._submitted.total()
        if queued >= self._max_queued:
            raise OverCapacity(f"{queued} requests are waiting, the limit is {self._max_queued}", queued)
        tenant = live.sequences[0].tenant
        own = self.waiting.get(tenant, 0) + self._submitted[tenant]
        if self._max_queued_per_tenant is not None and own >= self._max_queued_per_tenant:
            limit = f"max_queued_requests_per_tenant is {self._max_queued_per_tenant}"
            raise OverCapacity(f"{own} requests of tenant {shown(tenant)} are waiting, {limit}", own)
        self._submitted[tenant] += 1
        self._post(Submit(live, self._clock()))

    def abort(self, request_id: str) -> None:
        """Ask for a request to be dropped. Callable from any thread."""
        if not self._end:
            self._post(Abort(request_id))

    async def control(self, action: Callable[[], Any]) -> Any:
        """Run `action` in the loop's task and return what it returns. Raises EngineStopped."""
        self._check_open()
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._post(Control(action, reply))
        return await reply

    def drain(self) -> Iterator[Submit | Abort | Control]:
        """Take the messages, oldest first."""
        self._event.clear()
        self._submitted.clear()
        for _ in range(len(self._messages)):
            yield self._messages.popleft()

    def close(self, end: str) -> None:
        """Nobody drains any more: from now on, who would wait for an answer is refused with `end`."""
        self._end = end

    def _check_open(self) -> None:
        if self._end:
            raise EngineStopped(self._end)

    async def wait(self) -> None:
        """Sleep until there is a message."""
        await self._event.wait()

    def wake(self) -> None:
        """End `wait` without a message; from the loop's thread."""
        self._event.set()

    def _post(self, message: Submit | Abort | Control) -> None:
        self._messages.append(message)
        if threading.get_ident() == self._thread:
            self._event.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)
