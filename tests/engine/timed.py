"""The real loop on the fake device, in a time that only the device moves: every latency is exact."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.observe.counters import Counters
from engine.observe.observer import Observer
from engine.observe.prometheus import EngineCollector
from engine.plan import SampleBatch, StepPlan, StepResult
from engine.serving.inbox import Inbox
from tests.engine.fake_device import FakeDevice, FakeTicket
from tests.engine.server import Server
from tests.schedule.rig import BLOCK, scheduler_for

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


class TimedServer(Server):
    """One with an observer and metrics."""

    def __init__(self, num_blocks: int, max_num_seqs: int, budget: int, spans: Any = None) -> None:
        self.clock = FakeClock()
        device = TimedDevice(self.clock, num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=max_num_seqs, gated=True)
        scheduler = scheduler_for(device, budget)
        self.observer = Observer(scheduler.roster, Counters(1000), self.clock, spans)
        self.registry = CollectorRegistry()
        self.registry.register(
            EngineCollector(
                self.observer.counters, scheduler, model_name="tiny", cache_config={"num_gpu_blocks": num_blocks}
            )
        )
        super().__init__(scheduler, device, Inbox(10_000, self.clock), self.observer)

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
        await server.stop()
