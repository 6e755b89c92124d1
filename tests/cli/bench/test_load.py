"""The open loop in virtual time: who is sent when, and how late."""

import asyncio
from types import TracebackType
from typing import Any, Self

import pytest

from engine.cli.bench.load import TICK, Answer, BackendError, Run, Target, run_load
from engine.cli.bench.run import request_progress
from engine.cli.bench.workload import PlannedRequest
from tests.cli.bench.virtual_time import VirtualTime

SERVICE = 10.0


class SlowBackend:
    """Gives every request a token after a second and its last after SERVICE; a prompt [13] is refused."""

    def __init__(self, time: VirtualTime) -> None:
        self.time = time

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def target(self) -> Target:
        return Target("slow", 100, None)

    async def prepare(self, request: PlannedRequest) -> list[int]:
        return request.prompt

    async def send(self, prepared: list[int], answer: Answer) -> None:
        if prepared == [13]:
            raise BackendError("unlucky")
        if prepared == [99]:  # the client itself stands still, as in a long garbage collection
            self.time.now += 3.0
        await self.time.sleep(1.0)
        answer.came()
        await self.time.sleep(SERVICE - 1.0)
        answer.came()
        answer.output_tokens = 2


async def load(*requests: tuple[float, int], max_concurrency: int | None = None) -> Run:
    time = VirtualTime()
    planned = [PlannedRequest(at, [token], 2) for at, token in requests]
    return await time.run(
        run_load(
            SlowBackend(time), planned, max_concurrency=max_concurrency, clock=time.clock, sleep=time.sleep
        )
    )  # fmt: skip


async def test_arrivals_do_not_wait_for_answers() -> None:
    run = await load((0.0, 1), (0.5, 2), (0.5, 3), (4.0, 4))
    assert [a.sent - run.started for a in run.answers] == [0.0, 0.5, 0.5, 4.0]
    assert [[t - a.sent for t in a.times] for a in run.answers] == [[1.0, SERVICE]] * 4
    assert run.ended - run.started == 4.0 + SERVICE
    assert max(run.lateness) == pytest.approx(0.0, abs=1e-9)


async def test_a_door_holds_back_and_times_count_from_the_sending() -> None:
    run = await load((0.0, 1), (1.0, 2), (2.0, 3), max_concurrency=1)
    assert [a.sent - run.started for a in run.answers] == [0.0, SERVICE, 2 * SERVICE]
    assert [a.due - run.started for a in run.answers] == [0.0, 1.0, 2.0]
    assert [a.ended - a.sent for a in run.answers] == [SERVICE] * 3


async def test_a_failure_harms_no_other() -> None:
    run = await load((0.0, 1), (1.0, 13), (2.0, 3))
    assert [a.error for a in run.answers] == ["", "unlucky", ""]
    assert [len(a.times) for a in run.answers] == [2, 0, 2]


async def test_a_client_that_stands_still_is_late_at_arrivals_and_ticks() -> None:
    run = await load((0.0, 1), (1.0, 99), (2.0, 3), (30.0, 4))
    assert run.answers[2].sent - run.answers[2].due == pytest.approx(2.0)
    assert sorted(run.lateness)[-2:] == pytest.approx([2.0, 3.0], abs=TICK)


async def test_who_interrupts_a_load_has_what_was_finished() -> None:
    time = VirtualTime()
    planned = [PlannedRequest(at, [1], 2) for at in (0.0, 5.0, 8.0)]
    tasks: list[asyncio.Task[Any]] = []
    ended: list[float] = []

    def note() -> None:
        ended.append(time.now)
        if len(ended) == 2:  # as Ctrl-C does
            tasks[0].cancel()

    async def interrupted_load() -> Run:
        tasks.extend(task for task in [asyncio.current_task()] if task is not None)
        return await run_load(SlowBackend(time), planned, clock=time.clock, sleep=time.sleep, ended=note)

    run = await time.run(interrupted_load())
    assert (len(run.answers), run.planned) == (2, 3)
    assert run.ended - run.started == 5.0 + SERVICE


def test_ended_requests_are_counted_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 1.0, 6.0, 6.0, 7.0))
    with request_progress(3, lambda: next(times)) as ended:
        for _ in range(3):
            ended()
    assert capfd.readouterr() == ("", "bench: 2 of 3 requests have ended\n")
