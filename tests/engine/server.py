"""Server: the real loop over the fake device, whose steps end when the test lets them. Read next: `engine/loop.py`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from engine.grammar.masks import Masks
from engine.kv.groups import KVGroup
from engine.loop import EngineLoop
from engine.observe.observer import Observer
from engine.request.outputs import Delta
from engine.request.params import SamplingParams
from engine.schedule.scheduler import Scheduler
from engine.serving.beam import BeamRequest
from engine.serving.inbox import Inbox
from engine.serving.live_request import LiveRequest
from engine.serving.stream import OutputChannel, OutputStream
from tests.engine.fake_device import ONE_GROUP, FakeDevice, NextToken, hashed
from tests.schedule.rig import BLOCK, make_choices, scheduler_for


class Server:
    """A running loop and the few lines of Engine that a test needs."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: FakeDevice,
        inbox: Inbox,
        observer: Observer | None = None,
        masks: Masks | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.roster = scheduler.roster
        self.device = device
        self.inbox = inbox
        self.loop = EngineLoop(scheduler, device, inbox, observer, masks)
        self.task = asyncio.create_task(self.loop.run())
        self._num_requests = 0

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        name: str = "",
        *,
        eos: tuple[int, ...] = (),
        tenant: str = "",
        priority: int = 0,
        make_grammar: Callable[[], Any] = lambda: None,
        **params: Any,
    ) -> OutputStream:
        self._num_requests += 1
        name = name or f"r{self._num_requests}"
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        choices = make_choices(
            name, prompt, sampling, max_tokens, make_grammar, eos_token_ids=eos, tenant=tenant, priority=priority
        )
        channel = OutputChannel(sampling.n)
        kind = BeamRequest if sampling.use_beam_search else LiveRequest
        self.inbox.submit(kind(choices, channel, None))
        return OutputStream(name, prompt, channel, self.inbox.abort)

    async def settle(self) -> None:
        """Run until nothing is left to do."""
        self.device.open(10**9)
        await self.inbox.control(lambda: None)
        await self.loop.requests.is_empty.wait()
        await self.until(lambda: self.roster.is_idle)

    async def is_clean(self) -> bool:
        """No request, block or row is left; the loop is asleep."""
        await self.settle()
        problems = await self.inbox.control(self.roster.audit)
        kv = self.roster.kv
        return problems == [] and kv.num_available == kv.num_blocks

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop's task run until something has happened."""
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never happened")

    async def stop(self) -> None:
        """Streams that live end with it."""
        self.task.cancel()
        await asyncio.wait([self.task])


@asynccontextmanager
async def serving(
    *,
    num_blocks: int = 32,
    max_num_seqs: int = 4,
    budget: int = 16,
    queue: int = 100,
    next_token: NextToken = hashed,
    free_running: bool = True,
    groups: tuple[KVGroup, ...] = ONE_GROUP,
    block_size: int = BLOCK,
    masks: Masks | None = None,
    **scheduling: Any,
) -> AsyncIterator[Server]:
    device = FakeDevice(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        next_token=next_token,
        gated=True,
        groups=groups,
    )
    server = Server(scheduler_for(device, budget, **scheduling), device, Inbox(queue), masks=masks)
    if free_running:
        device.open(10**9)
    try:
        yield server
    finally:
        await server.stop()


async def collect(stream: OutputStream) -> list[Delta]:
    return [delta async for delta in stream]


async def tokens_of(stream: OutputStream) -> list[int]:
    return [t for delta in await collect(stream) for t in delta.token_ids]
