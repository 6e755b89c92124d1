"""EngineLoop: one iteration after another, with one step of overlap.

    intake()     drain the inbox: new requests, aborts, control
    schedule()   which rows run how many tokens, on which blocks
    launch()     device.forward, device.sample; rows under a grammar are sampled after settle, which tells their masks
    settle()     await the step before; append tokens, finish, index blocks, open the fence
    publish()    detokenize, check stop strings, push deltas

The observer is told at the end of each phase; it makes the iteration's record and the metrics.

Step N+1 is launched before step N is settled. The loop's task owns the scheduler, the KV state and
the device; everybody else talks to it through the inbox. When there is nothing to do it sleeps on
the inbox's event. A fault of one request ends that request; a fault of the device or of the loop
itself fails every request and then the loop.
Read next: `engine/scheduler.py`, `engine/publish.py`, `engine/observer.py`.
"""

import asyncio
import logging
from collections import deque
from dataclasses import replace
from typing import Literal

from engine.devices.protocol import Device, Ticket
from engine.errors import DeviceFault, EngineError, EngineStopped, RequestFault, StepFault
from engine.inbox import Abort, Control, Inbox, Submit
from engine.masks import Masks
from engine.observer import Observer
from engine.plan import StepResult
from engine.publish import LiveRequest
from engine.scheduler import Scheduler
from engine.settlement import Settled, Settlement
from engine.step import Step
from engine.trace import DEVICE, INTAKE, PUBLISH, SAMPLE, SCHEDULE, TASKS

logger = logging.getLogger(__name__)

State = Literal["serving", "draining", "stopped", "failed"]


class EngineLoop:
    """Owns the scheduler, the device and every live request."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        inbox: Inbox,
        observer: Observer | None = None,
        masks: Masks | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.observer = observer or Observer(scheduler)
        self.state: State = "serving"
        self.num_iterations = 0
        self.without_requests = asyncio.Event()
        self.without_requests.set()
        self._device = device
        self._inbox = inbox
        self._masks = masks
        self._in_flight: deque[tuple[Step, Ticket]] = deque()
        self._live: dict[str, LiveRequest] = {}
        self._ending: EngineError = EngineStopped("the engine has stopped")

    async def run(self) -> None:
        """Iterate until cancelled. Whatever ends the loop, every live request ends with the reason."""
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
            for live in list(self._live.values()):
                self._fail(live, self._ending)

    @property
    def has_work(self) -> bool:
        """A request is live, a step in flight or a message unread."""
        return bool(self._live or self._in_flight or self._inbox.num_messages)

    async def _iterate(self) -> None:
        self.num_iterations += 1
        self._intake()
        self.observer.mark(INTAKE)
        settled: tuple[Settlement, StepResult] | None = None
        if self._in_flight and self.scheduler.awaits_blocks():
            settled = await self._settle()
        step = self.scheduler.schedule()
        self._inbox.waiting = self.scheduler.waiting_by_tenant()
        self.observer.mark(SCHEDULE)
        if step is not None:
            self._device.forward(step.plan)
            self.observer.launched(step, self._live)
            if step.constrained and self._in_flight:
                settled = await self._settle()
            self._sample(step)
        if len(self._in_flight) > 1 or (self._in_flight and step is None):
            settled = await self._settle()
        elif step is None and settled is None:
            return await self.observer.idle(self._inbox.wait())
        if settled is not None:
            self._publish(*settled)
            self.observer.mark(PUBLISH)
        self.observer.end_iteration()

    def _intake(self) -> None:
        for message in self._inbox.drain():
            match message:
                case Submit(live, arrival):
                    live.times.arrival = arrival
                    self._admit(live)
                case Abort(request_id):
                    self._abort(request_id)
                case Control():
                    message.run()

    def _admit(self, live: LiveRequest) -> None:
        if self.state != "serving":
            live.channel.fail(EngineStopped(f"the engine is {self.state}"))
            return
        self._live[live.request_id] = live
        self.without_requests.clear()
        self.scheduler.add(live.sequences[0])

    def _abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            live.abort()
            self._forget(live)

    def _sample(self, step: Step) -> None:
        batch = step.batch
        if step.constrained and self._masks is not None:
            batch = replace(batch, masks=self._masks.fill(len(batch.rows), step.constrained))
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
            for request_id in {s.request_id for s in self.scheduler.abandon(step)}:
                self._fail(self._live[request_id], fault)
            return None
        self.observer.mark(DEVICE)
        self._in_flight.popleft()
        if step.constrained and self._masks is not None:
            self._masks.advance(step.constrained, result)
        settlement = self.scheduler.settle(step, result)
        self.observer.settled(settlement, result, self._live)
        return settlement, result

    def _publish(self, settlement: Settlement, result: StepResult) -> None:
        sequences, token_ids, samples, others = settlement
        for sequence, token_id, sample in zip(sequences, token_ids, samples, strict=True):
            if sequence.push_plain is None:
                self._publish_settled(Settled(sequence, token_id, sample, range(0), False, None), result)
                continue
            try:
                sequence.push_plain(token_id)
            except Exception as error:
                self._fail_text(sequence.request_id, error)
        for settled in others:
            self._publish_settled(settled, result)

    def _publish_settled(self, settled: Settled, result: StepResult) -> None:
        live = self._live.get(settled.sequence.request_id)
        if live is None:
            return
        if fault := _fault(settled):
            return self._fail(live, fault)
        try:
            live.publish(settled, result, self.scheduler)
        except Exception as error:
            return self._fail_text(live.request_id, error)
        if live.ended:
            self._forget(live)

    def _fail_text(self, request_id: str, error: Exception) -> None:
        live = self._live.get(request_id)
        if live is not None:
            logger.error("request %s failed while its text was made", request_id, exc_info=error)
            self._fail(live, RequestFault(f"making text failed: {error!r}"))

    def _fail(self, live: LiveRequest, error: EngineError) -> None:
        live.channel.fail(error)
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        for sequence in live.sequences:
            self.scheduler.finish(sequence)
        del self._live[live.request_id]
        self.observer.finished(live)
        if not self._live:
            self.without_requests.set()

    def drain(self) -> None:
        """Take no more requests."""
        if self.state == "serving":
            self.state = "draining"

    def end_with(self, reason: EngineError) -> None:
        """What live requests end with when the loop's task is cancelled."""
        self._ending = reason


def _fault(settled: Settled) -> EngineError | None:
    """Why the sequence's request cannot go on, None when it can."""
    grammar = settled.sequence.grammar
    if grammar is not None and grammar.error is not None:
        return grammar.error
    if settled.faulted:
        return RequestFault("no token to sample: the model's logits are not finite, or the request's rules leave none")
    return None
