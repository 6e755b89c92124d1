"""CudaDevice: the loop's side of the executor. Launches in the loop's thread, results through one waiting thread.

Launching is queueing, so the loop does it itself. To learn that a step has ended somebody must ask the driver: polling
costs the loop a timer's delay or its processor, and a host callback runs in the driver's thread and holds up the
stream while it waits for the GIL. So one thread sleeps in `event.synchronize`, which releases the GIL, and wakes the
loop. If the GPU faults, every ticket in flight and every later one raises DeviceFault with the reason.
Read next: `engine/devices/cuda/executor.py`.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from engine.config import LoadFormat
from engine.devices.cuda.buffers import out_of_memory
from engine.devices.cuda.executor import CudaExecutor
from engine.devices.cuda.launched import Launched
from engine.devices.cuda.registry import KernelRegistry
from engine.devices.cuda.shape import CudaShape
from engine.devices.protocol import DeviceInfo
from engine.devices.ticket import FutureTicket
from engine.errors import DeviceFault, EngineError, StepFault
from engine.plan import SampleBatch, StepPlan, StepResult
from loader.progress import byte_progress
from loader.weights import WeightSource, dummy_weights, plan_weights


class CudaDevice:
    """Made by `open`; a Device."""

    def __init__(self, executor: CudaExecutor, name: str) -> None:
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._info = DeviceInfo("cuda", name, executor.shape.dtype)
        self._fault: DeviceFault | None = None
        self._rejected: StepFault | None = None
        self._launched: queue.SimpleQueue[tuple[Launched, asyncio.Future[StepResult]] | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="cuda-waiter", daemon=True)
        self._waiter.start()

    @classmethod
    async def open(cls, shape: CudaShape, path: Path, load_format: LoadFormat, seed: int) -> Self:
        """Load the model and every kernel it needs. Raises ConfigError, CheckpointError or DeviceFault."""
        return cls(await asyncio.to_thread(_load, shape, path, load_format, seed), _gpu_name())

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def forward(self, plan: StepPlan) -> None:
        self._rejected = None
        self._attempt(lambda: self._executor.forward(plan))

    def sample(self, batch: SampleBatch) -> FutureTicket:
        future: asyncio.Future[StepResult] = self._loop.create_future()
        if self._rejected is None:
            self._attempt(lambda: self._launched.put((self._executor.sample(batch), future)))
        fault = self._fault or self._rejected
        if fault is not None:
            future.set_exception(fault)
        return FutureTicket(future)

    def on_failure(self, tell: Callable[[EngineError], None]) -> None:
        """CUDA reports what is wrong where it is called, so a ticket says it."""

    async def close(self) -> None:
        if self._waiter.is_alive():
            self._launched.put(None)
            await asyncio.to_thread(self._waiter.join)

    def _attempt(self, launch: Callable[[], None]) -> None:
        """Queue work; a plan that is wrong or finds no memory fails its step, another error of CUDA the device."""
        if self._fault is not None:
            return
        try:
            launch()
        except ValueError as error:
            self._rejected = StepFault(f"cuda device: ValueError: {error}")
        except _cuda_errors() as error:
            if _is_out_of_memory(error):
                _free_pools()
                self._rejected = StepFault(str(out_of_memory(error)))
            else:
                self._fault = _device_fault(error)

    def _wait(self) -> None:
        """The thread: wait for steps in their order, hand each to the loop."""
        while (item := self._launched.get()) is not None:
            launched, future = item
            outcome: StepResult | DeviceFault
            try:
                launched.wait()
                outcome = launched.result()
            except Exception as error:  # whatever it is, somebody waits for the ticket
                outcome = _device_fault(error)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._settle, launched, future, outcome)

    def _settle(
        self, launched: Launched, future: asyncio.Future[StepResult], outcome: StepResult | DeviceFault
    ) -> None:
        if isinstance(outcome, StepResult):
            launched.release()
            future.set_result(outcome)
        else:
            self._fault = outcome
            future.set_exception(outcome)


def _load(shape: CudaShape, path: Path, load_format: LoadFormat, seed: int) -> CudaExecutor:
    source: WeightSource
    source = dummy_weights(shape.decoder, seed) if load_format == "dummy" else plan_weights(path, shape.decoder)
    registry = KernelRegistry(gpu_arch())
    try:
        with byte_progress("Loading weights", source.nbytes) as advance:
            return CudaExecutor(shape, source, registry, advance)
    except _cuda_errors() as error:
        raise _device_fault(error) from error


def gpu_arch() -> str:
    """The architecture that kernels are compiled for."""
    import cupy

    return f"sm_{cupy.cuda.Device().compute_capability}"


def _gpu_name() -> str:
    import cupy

    name: bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    return name.decode()


def _cuda_errors() -> tuple[type[Exception], ...]:
    import cupy

    cuda = cupy.cuda
    return cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, cuda.memory.OutOfMemoryError


def _device_fault(error: Exception) -> DeviceFault:
    return out_of_memory(error) if _is_out_of_memory(error) else DeviceFault(f"cuda device: {error}")


def _is_out_of_memory(error: Exception) -> bool:
    """CuPy's own, or the driver's and the runtime's, which leave the context as it was."""
    return any(
        name in f"{type(error).__name__} {error}" for name in ("OutOfMemory", "OUT_OF_MEMORY", "MemoryAllocation")
    )


def _free_pools() -> None:
    """Give back what CuPy holds and nobody uses, for the next step to have it."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
