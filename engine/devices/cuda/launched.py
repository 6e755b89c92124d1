"""Launched: a step on its way, and how its results lie in its slot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from engine.devices.cuda.slots import Slot
from engine.plan import Int32Array, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Table:
    """Room in a slot for the log-probabilities of `size` tokens with `width` alternatives each."""

    slot: Slot
    size: int
    width: int
    logprobs: slice
    ranks: slice
    top_ids: slice
    top_logprobs: slice

    @classmethod
    def take(cls, slot: Slot, counts: Int32Array, vocab: int) -> Self | None:
        """Room for what tokens ask for, -1 being nothing; None if none of them asks."""
        size, most = len(counts), int(counts.max(initial=-1))
        if most < 0:
            return None
        width = min(most, vocab)
        return cls(slot, size, width, *(slot.room(words) for words in (size, size, size * width, size * width)))

    def rows(self, tile: slice) -> tuple[Any, Any, Any, Any]:
        """The arrays on the GPU for the tokens of `tile`. Valid once all room has been taken."""
        wide = slice(tile.start * self.width, tile.stop * self.width)
        parts = ((self.logprobs, tile, np.float32), (self.ranks, tile, np.int32))
        tops = ((self.top_ids, wide, np.int32), (self.top_logprobs, wide, np.float32))
        a, b, c, d = (self.slot.results(room, dtype)[within] for room, within, dtype in (*parts, *tops))
        return a, b, c, d

    def read(self) -> TokenLogprobs:
        """Copies of the arrays on the host."""
        read, shape = self.slot.read, (self.size, self.width)
        return TokenLogprobs(
            read(self.logprobs, np.float32),
            read(self.ranks),
            read(self.top_ids).reshape(shape),
            read(self.top_logprobs, np.float32).reshape(shape),
        )


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose last operation has been queued.

    Attributes:
        free: takes the slot back.
    """

    step: int
    slot: Slot
    token_ids: slice
    faulted: slice
    logprobs: Table | None
    prompt_logprobs: Table | None
    free: Callable[[Slot], None]

    def wait(self) -> None:
        """Sleep until the results are on the host. Raises what CUDA reports of this step or one before."""
        self.slot.arrived.synchronize()

    def result(self) -> StepResult:
        """After `wait`."""
        return StepResult(
            step=self.step,
            token_ids=self.slot.read(self.token_ids),
            faulted=self.slot.read(self.faulted).astype(np.bool_),
            logprobs=None if self.logprobs is None else self.logprobs.read(),
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs.read(),
            device_seconds=self.slot.seconds(),
        )

    def release(self) -> None:
        """Give the slot back, once; by the thread that launches."""
        self.free(self.slot)
