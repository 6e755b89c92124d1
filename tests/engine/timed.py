"""The real loop on the fake device, in a time that only the device moves: every latency is exact."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.counters import Counters
from engine.inbox import Inbox
from engine.kv.groups import KVGroup
from engine.kv.manager import KVManager
from engine.loop import EngineLoop
from engine.metrics import EngineCollector
from engine.observer import Observer
from engine.plan import SampleBatch, StepPlan, StepResult
from engine.publish import LiveRequest
from engine.request import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stream import OutputChannel, OutputStream
from tests.engine.fake_device import FakeDevice, FakeTicket

BLOCK = 4
FORWARD, SAMPLE, STEP = 1.0, 0.5, 10.0
"""Seconds that the device's calls take. Binary fractions, so that sums are exact."""


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TimedDevice(FakeDevice):
    """Takes FORWARD and SAMPLE to launch a step and STEP to run it, which starts when its result is awaited."""

    def __init__(self, clock: FakeClock, **config: Any) -> None:
        super().__init__(**config)
        self._clock = clock

    def forward(self, plan: StepPlan) -> None:
        self._clock.now += FORWARD
        super().forward(plan)

    def sample(self, batch: SampleBatch) -> FakeTicket:
        self._clock.now += SAMPLE
        return super().sample(batch)

    def run_until(self, step: int) -> StepResult:
        self._clock.now += STEP
        result = super().run_until(step)
        object.__setattr__(result, "device_seconds", STEP)
        return result


class TimedServer:
    """A running loop with its observer and metrics."""

    def __init__(self, num_blocks: int, max_num_seqs: int, budget: int, spans: Any = None) -> None:
        kv = KVManager([KVGroup(None, (0,))], num_blocks, BLOCK, enable_prefix_caching=True)
        self.clock = FakeClock()
        self.scheduler = Scheduler(
            kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, enable_chunked_prefill=True
        )
        self.device = TimedDevice(
            self.clock, num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=max_num_seqs, gated=True
        )
        self.inbox = Inbox(10_000, self.clock)
        self.observer = Observer(self.scheduler, Counters(1000), self.clock, spans)
        self.registry = CollectorRegistry()
        self.registry.register(
            EngineCollector(
                self.observer.counters, self.scheduler, model_name="tiny", cache_config={"num_gpu_blocks": num_blocks}
            )
        )
        self.loop = EngineLoop(self.scheduler, self.device, self.inbox, self.observer)
        self.task = asyncio.create_task(self.loop.run())
        self._num_requests = 0

    def generate(self, prompt: list[int], max_tokens: int, name: str = "", **params: Any) -> OutputStream:
        self._num_requests += 1
        name = name or f"r{self._num_requests}"
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        choices = [
            Sequence(name, prompt, sampling, max_output=max_tokens, seed=0, index=i)
            for i in range(sampling.num_choices)
        ]
        choices[0].forks = tuple(choices[1:])
        channel = OutputChannel(sampling.n)
        self.inbox.submit(LiveRequest(choices, channel, None))
        return OutputStream(name, prompt, channel, self.inbox.abort)

    async def settle(self) -> None:
        """Run until nothing is left to do."""
        self.device.open(10**9)
        await self.inbox.control(lambda: None)
        await self.loop.without_requests.wait()
        await self.until(lambda: self.scheduler.is_idle)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never happened")

    def metrics(self) -> dict[str, float]:
        """Every sample as a scraper reads it, by name and its labels other than model_name and engine."""
        return parse(generate_latest(self.registry).decode())


def parse(text: str) -> dict[str, float]:
    """Samples by "name" or "name{label=value,...}"; every one must be of model tiny, engine 0."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
            rest = ",".join(f"{k}={v}" for k, v in labels.items())
            samples[f"{sample.name}{{{rest}}}" if rest else sample.name] = sample.value
    return samples


@asynccontextmanager
async def timed_server(
    *, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 64, spans: Any = None
) -> AsyncIterator[TimedServer]:
    """A server whose device waits to be opened."""
    server = TimedServer(num_blocks, max_num_seqs, budget, spans)
    try:
        yield server
    finally:
        server.task.cancel()
        await asyncio.wait([server.task])
