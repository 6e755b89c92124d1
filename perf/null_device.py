"""NullDevice: a device that computes nothing, for measuring what is around one."""

import asyncio
from collections.abc import Callable
from time import perf_counter

import numpy as np

from engine.devices.protocol import DeviceInfo
from engine.errors import EngineError
from engine.plan import SampleBatch, StepPlan, StepResult
from engine.text.tokenizer import TextTokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and nobody (not even the dog) knows why it did so in 2026.\n"


class NullDevice:
    """Answers with ids of English text. A step takes `step_seconds` and begins when the one before it has ended."""

    def __init__(self, tokenizer: TextTokenizer, rows: int, step_seconds: float = 0.0) -> None:
        self.info = DeviceInfo("null", "nothing", "none")
        self.step_seconds = step_seconds
        token_ids = tokenizer.encode(TEXT)
        ids = np.array([token_ids[i % len(token_ids)] for i in range(rows + len(token_ids))], np.int32)
        self._ids = [ids[i : i + rows].copy() for i in range(len(token_ids))]
        self._no_fault = np.zeros(rows, np.bool_)
        self._free_at = 0.0

    def forward(self, plan: StepPlan) -> None:
        """Do nothing."""

    def sample(self, batch: SampleBatch) -> "NullTicket":
        self._free_at = max(self._free_at, perf_counter()) + self.step_seconds
        return NullTicket(self, batch, self._free_at)

    async def run(self, batch: SampleBatch, ends_at: float) -> StepResult:
        """The step's result, at its time."""
        if self.step_seconds and (delay := ends_at - perf_counter()) > 0:
            await asyncio.sleep(delay)
        sampled, ids = len(batch.entries), self._ids[batch.step % len(self._ids)]
        return StepResult(batch.step, ids[:sampled], self._no_fault[:sampled], None, None, self.step_seconds)

    def on_failure(self, tell: Callable[[EngineError], None]) -> None:
        """Nothing breaks."""

    async def close(self) -> None:
        """Nothing to close."""


class NullTicket:
    """A step in flight."""

    def __init__(self, device: NullDevice, batch: SampleBatch, ends_at: float) -> None:
        self._device, self._batch, self._ends_at = device, batch, ends_at

    def done(self) -> bool:
        """Whether its time is over; never when steps take none, so that only the host's own work is seen."""
        return bool(self._device.step_seconds) and perf_counter() >= self._ends_at

    async def result(self) -> StepResult:
        return await self._device.run(self._batch, self._ends_at)
