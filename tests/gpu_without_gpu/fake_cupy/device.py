"""The state of the pretended GPU: its properties, its memory, and what has gone wrong.

One `Gpu` is current at a time (`gpu()`); `fake_cupy.installed` makes a new one. `lock` guards everything that
the double's streams do: the engine calls from its event loop and from a thread that waits for events.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from tests.gpu_without_gpu import executor
from tests.gpu_without_gpu.machine import Allocation

_PAGE = 512  # CuPy's pool rounds allocations up to this


class CUDARuntimeError(RuntimeError):
    """As `cupy.cuda.runtime.CUDARuntimeError`."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name}: raised by the CuPy double")


class CUDADriverError(RuntimeError):
    """As `cupy.cuda.driver.CUDADriverError`."""


class OutOfMemoryError(MemoryError):
    """As `cupy.cuda.memory.OutOfMemoryError`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What GPU to pretend.

    Attributes:
        progress: when queued work runs. "lazy": when something waits for it; "eager": at once; "random": either.
        schedule: how kernels run; None takes another random one for each launch.
        check_races: without it kernels run about twice as fast; bounds are checked all the same.
    """

    compute_capability: str = "80"
    memory: int = 4 << 30
    device_count: int = 1
    driver_version: int = 13000
    multiprocessors: int = 4
    cublas: bool = True
    progress: Literal["lazy", "eager", "random"] = "lazy"
    schedule: executor.Schedule | None = executor.SCHEDULES[0]
    check_races: bool = True
    seed: int = 0


@dataclass(slots=True)
class Gpu:
    settings: Settings
    lock: threading.RLock = field(default_factory=threading.RLock)
    launches: Counter[str] = field(default_factory=Counter)  # kernels that ran, by name
    gemms: int = 0
    used: int = 0
    fault: BaseException | None = None  # as on a GPU, sticks: every later synchronisation raises it
    _injected: list[str] = field(default_factory=list)

    def take(self, nbytes: int) -> None:
        rounded = -(-max(nbytes, 1) // _PAGE) * _PAGE
        if self.used + rounded > self.settings.memory:
            raise OutOfMemoryError(
                f"Out of memory allocating {rounded:,} bytes (allocated so far: {self.used:,} bytes)."
            )
        self.used += rounded

    def give_back(self, nbytes: int) -> None:
        self.used -= -(-max(nbytes, 1) // _PAGE) * _PAGE

    def inject(self, name: str) -> None:
        """Let the next work that runs fail with this CUDA error, such as "cudaErrorIllegalAddress"."""
        self._injected.append(name)

    def check(self) -> None:
        """Raise the fault that the GPU is in, or enter an injected one."""
        if self._injected and self.fault is None:
            self.fault = CUDARuntimeError(self._injected.pop())
        if self.fault is not None:
            raise self.fault


_current = Gpu(Settings())


def gpu() -> Gpu:
    return _current


def replace_gpu(new: Gpu) -> Gpu:
    """Make `new` current; the one before."""
    global _current
    old, _current = _current, new
    return old


class Memory:
    """One allocation on the current GPU. Poisoned; freed with the object, whatever is still queued for it."""

    def __init__(self, nbytes: int) -> None:
        self._gpu = gpu()
        self._gpu.take(nbytes)
        self.size = nbytes
        self.allocation = Allocation(max(nbytes, 1))
        self.ptr = self.allocation.ptr
        self.device_id = 0

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            self._gpu.give_back(self.size)
