"""CudaDevice: the loop's side of the executor. Launches in the loop's thread, results through one waiting thread.

Launching is queueing, so the loop does it itself. To learn that a step has ended somebody must ask the driver: polling costs
the loop a timer's delay or its processor, and a host callback runs in the driver's thread and holds up the
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
from engine.devices.cuda.executor import CudaExecutor, Launched, cuda_errors
from engine.devices.cuda.shape import CudaShape
from engine.devices.protocol import DeviceInfo
from engine.errors import ConfigError, DeviceFault, StepFault
from engine.plan import SampleBatch, StepPlan, StepResult
from loader.progress import byte_progress
from loader.weights import WeightSource, dummy_weights, plan_weights


class CudaTicket:
    """A step in flight on the GPU."""

    def __init__(self, future: asyncio.Future[StepResult]) -> None:
        self._future = future
        future.add_done_callback(_retrieve)

    def done(self) -> bool:
        return self._future.done()

    async def result(self) -> StepResult:
        return await asyncio.shield(self._future)  # a cancelled waiter must not cancel the step


def _retrieve(future: asyncio.Future[StepResult]) -> None:
    """A ticket nobody waits for any more is not an error to be logged."""
    if not future.cancelled():
        future.exception()


class CudaDevice:
    """Made by `open`; a Device."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._info = DeviceInfo("cuda", executor.name, executor.shape.dtype)
        self._fault: DeviceFault | None = None
        self._rejected: tuple[int, StepFault] | None = None
        self._launched: queue.SimpleQueue[tuple[Launched, asyncio.Future[StepResult]] | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="cuda-waiter", daemon=True)
        self._waiter.start()

    @classmethod
    async def open(cls, shape: CudaShape, path: Path, load_format: LoadFormat, seed: int) -> Self:
        """Load the model and every kernel it needs. Raises ConfigError, CheckpointError or DeviceFault."""
        return cls(await asyncio.to_thread(_load, shape, path, load_format, seed))

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def forward(self, plan: StepPlan) -> None:
        self._rejected = None
        self._launch(plan.step, lambda: self._executor.forward(plan))

    def sample(self, batch: SampleBatch) -> CudaTicket:
        future: asyncio.Future[StepResult] = self._loop.create_future()
        if self._fault is None and self._rejected is None:
            self._launch(batch.step, lambda: self._launched.put((self._executor.sample(batch), future)))
        if self._fault is not None:
            future.set_exception(self._fault)
        elif self._rejected is not None:
            future.set_exception(self._rejected[1])
        return CudaTicket(future)

    async def close(self) -> None:
        if not self._waiter.is_alive():
            return
        self._launched.put(None)
        await asyncio.to_thread(self._waiter.join)
        self._executor.close()

    def _launch(self, step: int, launch: Callable[[], None]) -> None:
        """Queue work; a plan that is wrong fails its step, an error of CUDA the device."""
        if self._fault is not None:
            return
        try:
            launch()
        except ValueError as error:
            self._rejected = step, StepFault(f"cuda device: ValueError: {error}")
        except cuda_errors() as error:
            self._fault = _fault(error)

    def _wait(self) -> None:
        """The thread: wait for steps in order and hand their results to the loop."""
        while (item := self._launched.get()) is not None:
            launched, future = item
            try:
                launched.wait()
                settle, value = self._settle, launched
            except cuda_errors() as error:
                settle, value = self._fail, _fault(error)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(settle, future, value)

    def _settle(self, future: asyncio.Future[StepResult], launched: Launched) -> None:
        future.set_result(launched.result())

    def _fail(self, future: asyncio.Future[StepResult], fault: DeviceFault) -> None:
        self._fault = fault
        future.set_exception(fault)
