"""The Device protocol: what the loop needs from whatever runs the model.

`cpu/` and `cuda/` implement it; tests use a scripted one. The loop is its only
caller. A device executes steps strictly in the order they were launched and takes at least
two before the first one's ticket has resolved. Read next: `engine/plan.py`, `engine/loop.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.errors import EngineError
from engine.plan import SampleBatch, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Facts shown at start and in GetInfo.

    Attributes:
        kind: "cpu" or "cuda".
        name: one line for people, e.g. processor and thread count.
        dtype: the compute dtype, "bfloat16" or "float32".
    """

    kind: str
    name: str
    dtype: str


class Ticket(Protocol):
    """A step in flight."""

    def done(self) -> bool:
        """Whether `result()` would return at once."""

    async def result(self) -> StepResult:
        """Wait for the step. Raises DeviceFault when the device failed."""


class Device(Protocol):
    """Runs steps. All methods are called from the loop's thread and never block it."""

    @property
    def info(self) -> DeviceInfo: ...

    def forward(self, plan: StepPlan) -> None:
        """Launch the forward pass of `plan`."""

    def sample(self, batch: SampleBatch) -> Ticket:
        """Launch sampling for the plan just launched; its ticket covers both calls."""

    def on_failure(self, tell: Callable[[EngineError], None]) -> None:
        """Have `tell` called, in the loop's thread, if the device breaks while no ticket is there to say so."""

    async def close(self) -> None:
        """Stop the device and give its memory back; idempotent."""
