"""Load: sends requests when they are due, whatever became of the ones before (an open loop).

A closed loop would wait for answers, and a slow server would be asked less. `max_concurrency` puts slots in
front: a request that finds none free is sent later, and its times count from then, as in vLLM's benchmark.
The client's own lateness is measured all the time, because a client that cannot keep up makes a server look slow.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from engine.cli.bench.workload import PlannedRequest

Prepared = TypeVar("Prepared")
Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]

TICK = 0.05
"""Seconds between looks at how late the event loop is."""


class BackendError(Exception):
    """One line: why a request failed, or why the server cannot be measured at all."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a backend knows of its server; token ids of prompts are drawn below `vocab_size`.

    `facts` are for the reader of a report, by name.
    """

    model: str
    vocab_size: int
    max_model_len: int | None
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Answer:
    """What a client saw of one request. Times are of the clock, in seconds.

    Attributes:
        due: when it should have been sent.
        sent: when it was.
        times: when each message with tokens came.
        ended: when the last message had come, or the failure.
        output_tokens: tokens received, as the server counts them.
        prompt_tokens: tokens of the prompt, as the server counts them where it does.
        error: why it failed; empty if it did not.
    """

    clock: Clock
    due: float
    prompt_tokens: int
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    output_tokens: int = 0
    error: str = ""

    def came(self) -> None:
        """A message with tokens is here."""
        self.times.append(self.clock())


class Backend(Protocol[Prepared]):
    """A way to send requests. Use with `async with`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def target(self) -> Target:
        """What the server is. Raises BackendError."""
        ...

    async def prepare(self, request: PlannedRequest) -> Prepared:
        """All work that need not be done while time counts. Raises BackendError."""
        ...

    async def send(self, prepared: Prepared, answer: Answer) -> None:
        """Send a request and read its answer to the end. Raises BackendError."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """A load that has ended.

    Attributes:
        answers: of the requests that have ended.
        lateness: seconds by which the client was late, at arrivals and at ticks.
        planned: requests there would have been, had nobody interrupted it.
    """

    started: float
    ended: float
    answers: list[Answer]
    lateness: list[float]
    planned: int


async def run_load(
    backend: Backend[Prepared],
    requests: Sequence[PlannedRequest],
    *,
    max_concurrency: int | None = None,
    clock: Clock = time.perf_counter,
    sleep: Sleep = asyncio.sleep,
    ended: Callable[[], object] = lambda: None,
) -> Run:
    """Send every request and read every answer; failures are in the answers. `requests` are in order of arrival.

    `ended` is called as each has ended. Who interrupts it has the run so far. Raises KeyboardInterrupt if that is none.
    """
    prepared = [await backend.prepare(request) for request in requests]
    slots: AbstractAsyncContextManager[object] = (
        nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    lateness: list[float] = []
    started = clock()
    answers = [Answer(clock, started + r.at, len(r.prompt)) for r in requests]
    ticks = asyncio.create_task(_tick(lateness, clock, sleep))

    async def send_all() -> None:
        async with asyncio.TaskGroup() as group:
            for answer, message in zip(answers, prepared, strict=True):
                if (wait := answer.due - clock()) > 0:
                    await sleep(wait)
                lateness.append(clock() - answer.due)
                group.create_task(_send(backend, message, answer, slots)).add_done_callback(lambda _: ended())

    try:
        if await interrupted(send_all()):
            answers = [a for a in answers if a.ended]
    finally:
        ticks.cancel()
    if not answers:
        raise KeyboardInterrupt
    return Run(started, max(a.ended for a in answers), answers, lateness, len(requests))


async def interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`; True if Ctrl-C, which cancels the task that runs, has cut it short."""
    task = asyncio.current_task()
    assert task is not None
    try:
        await work
    except asyncio.CancelledError:
        task.uncancel()
        return True
    return False


async def _send(
    backend: Backend[Prepared], message: Prepared, answer: Answer, slots: AbstractAsyncContextManager[object]
) -> None:
    async with slots:
        answer.sent = answer.clock()
        try:
            await backend.send(message, answer)
        except BackendError as error:
            answer.error = str(error)
        answer.ended = answer.clock()
    if not answer.error and not answer.times:
        answer.error = "the answer has no tokens"


async def _tick(lateness: list[float], clock: Clock, sleep: Sleep) -> None:
    while True:
        due = clock() + TICK
        await sleep(TICK)
        lateness.append(clock() - due)
