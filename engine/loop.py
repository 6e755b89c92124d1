"""EngineLoop: one iteration after another, with one step of overlap.

    intake()     drain the inbox: new requests, aborts, control
    schedule()   which rows run how many tokens, on which blocks
    launch()     device.forward, device.sample; rows under a grammar are sampled after settle, which tells their masks
    settle()     await the step before; append tokens, finish, index blocks, open the fence
    publish()    detokenize, check stop strings, push deltas

The observer is told at the end of each phase; it makes the iteration's record and the metrics.

Step N+1 is launched before step N is settled. The loop's task owns the roster, the KV state and
the device; everybody else talks to it through the inbox. When there is nothing to do it sleeps on
the inbox's event. A fault of one request ends that request; a fault of the device or of the loop
itself fails every request and then the loop.
Read next: `engine/schedule/scheduler.py`, `engine/serving/registry.py`, `engine/observe/observer.py`.
"""

import asyncio
from collections import deque
from dataclasses import replace
from typing import Literal

from engine.devices.protocol import Device, Ticket
from engine.errors import DeviceFault, EngineError, EngineStopped, StepFault
from engine.grammar.masks import Masks
from engine.observe.observer import Observer
from engine.observe.records import DEVICE, INTAKE, PUBLISH, SAMPLE, SCHEDULE, TASKS
from engine.plan import StepResult
from engine.schedule.scheduler import Scheduler
from engine.schedule.settle import Settlement, abandon, settle
from engine.schedule.step import Step
from engine.serving.inbox import Abort, Control, Inbox, Submit
from engine.serving.registry import RequestRegistry

State = Literal["serving", "draining", "stopped", "failed"]


class EngineLoop:
    """Owns the roster, the device and the registry of requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        inbox: Inbox,
        observer: Observer | None = None,
        masks: Masks | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.roster = scheduler.roster
        self.observer = observer or Observer(scheduler.roster)
        self.requests = RequestRegistry(self.roster, self.observer.finished)
        self.state: State = "serving"
        self.num_iterations = 0
        self._device = device
        self._inbox = inbox
        self._masks = masks
        self._in_flight: deque[tuple[Step, Ticket]] = deque()
        self._ending: EngineError = EngineStopped("the engine has stopped")
        self._broken: EngineError | None = None

    async def run(self) -> None:
        """Iterate until cancelled. Whatever ends the loop, every live request ends with the reason."""
        self._device.on_failure(self._note_failure)
        try:
            while True:
                await self._iterate()
        except EngineError as fault:
            self.state, self._ending = "failed", fault
            raise
        except Exception as fault:
            self.state, self._ending = "failed", DeviceFault(f"the engine loop failed: {fault!r}")
            raise
        finally:
            if self.state != "failed":
                self.state = "stopped"
            self._intake()
            self._inbox.close(f"the engine is {self.state}")
            self.requests.fail_all(self._ending)

    @property
    def has_work(self) -> bool:
        """A request is live, a step in flight or a message unread."""
        return bool(self.requests.live or self._in_flight or self._inbox.num_messages)

    async def _iterate(self) -> None:
        self.num_iterations += 1
        self._intake()
        self.observer.mark(INTAKE)
        settled: tuple[Settlement, StepResult] | None = None
        if self._in_flight and self.scheduler.awaits_blocks():
            settled = await self._settle()
        step = self.scheduler.schedule()
        self._inbox.waiting = self.roster.waiting_by_tenant()
        self.observer.mark(SCHEDULE)
        if step is not None:
            self._device.forward(step.plan)
            self.observer.launched(step, self.requests.live)
            if step.constrained and self._in_flight:
                settled = await self._settle()
            self._sample(step)
        if len(self._in_flight) > 1 or (self._in_flight and step is None):
            settled = await self._settle()
        elif step is None and settled is None:
            if self._broken is not None:
                raise self._broken
            return await self.observer.idle(self._inbox.wait())
        if settled is not None:
            self.requests.publish(*settled)
            self.observer.mark(PUBLISH)
        self.observer.end_iteration()

    def _intake(self) -> None:
        for message in self._inbox.drain():
            match message:
                case Submit(request, arrival):
                    request.times.arrival = arrival
                    if self.state == "serving":
                        self.requests.add(request)
                    else:
                        request.channel.fail(EngineStopped(f"the engine is {self.state}"))
                case Abort(request_id):
                    self.requests.abort(request_id)
                case Control():
                    message.run()

    def _sample(self, step: Step) -> None:
        batch = step.batch
        if step.constrained and self._masks is not None:
            batch = replace(batch, masks=self._masks.fill(len(batch.rows), step.grammars()))
        self._in_flight.append((step, self._device.sample(batch)))
        self.observer.mark(SAMPLE)

    async def _settle(self) -> tuple[Settlement, StepResult] | None:
        """What the oldest step in flight brought; None if it failed."""
        step, ticket = self._in_flight[0]
        if ticket.done():
            await asyncio.sleep(0)  # a device faster than the loop must not starve the server's tasks
            self.observer.mark(TASKS)
        try:
            result = await ticket.result()
        except StepFault as fault:
            self.observer.mark(DEVICE)
            self._in_flight.popleft()
            for request_id in {s.request_id for s in abandon(self.roster, step)}:
                self.requests.fail(request_id, fault)
            return None
        self.observer.mark(DEVICE)
        self._in_flight.popleft()
        if step.constrained and self._masks is not None:
            self._masks.advance(step.grammars(), result)
        settlement = settle(self.roster, step, result)
        self.observer.settled(settlement, result, self.requests.live)
        return settlement, result

    def _note_failure(self, fault: EngineError) -> None:
        """The device broke while nothing was in flight."""
        self._broken = fault
        self._inbox.wake()

    def drain(self) -> None:
        """Take no more requests."""
        if self.state == "serving":
            self.state = "draining"

    def end_with(self, reason: EngineError) -> None:
        """What live requests end with when the loop's task is cancelled."""
        self._ending = reason
