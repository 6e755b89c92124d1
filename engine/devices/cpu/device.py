"""CpuDevice: the parent's side of the worker process.

Calls write a slot of the ring and a message to a socket, both without waiting; results resolve futures from the
loop's reader. If the worker ends, every ticket in flight and every later one raises DeviceFault with the reason.
Read next: `engine/devices/cpu/worker.py`.
"""

import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

from engine.devices.cpu.messages import Decoder, Failed, Forward, Open, OpenFailed, Ready, Result, Sample, encode
from engine.devices.cpu.ring import SLOTS, Ring, read_logprobs
from engine.devices.protocol import DeviceInfo
from engine.devices.ticket import FutureTicket
from engine.errors import ConfigError, DeviceFault, EngineError, StepFault
from engine.plan import SampleBatch, StepPlan, StepResult
from loader.errors import CheckpointError

_EXIT_SECONDS = 5.0
"""How long a worker may take to notice that its socket has closed: one long step."""


class CpuDevice(asyncio.Protocol):
    """Made by `open`; a Device."""

    def __init__(self, opening: Open) -> None:
        shape = opening.shape
        self._info = DeviceInfo("cpu", f"{_processor()}, {shape.threads} threads", shape.dtype)
        self._ring = Ring(opening.limits)
        self._free = deque(range(SLOTS))
        self._launched: tuple[int, StepPlan] | None = None
        self._waiting: dict[int, asyncio.Future[StepResult]] = {}
        self._messages = Decoder()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._fault: EngineError | CheckpointError | None = None
        self._closing = False
        self._tell: Callable[[EngineError], None] = lambda fault: None
        self._transport: asyncio.WriteTransport
        self._process: subprocess.Popen[bytes]

    @classmethod
    async def open(cls, opening: Open) -> Self:
        """Start a worker and wait until the model is loaded.

        Raises ConfigError, CheckpointError or DeviceFault.
        """
        device = cls(opening)
        ours, theirs = socket.socketpair()
        try:
            device._process = _start_worker(theirs.fileno(), device._ring.fd)
        except OSError as error:
            ours.close()
            device._ring.close()
            raise DeviceFault(f"the cpu worker cannot be started: {error}") from error
        finally:
            theirs.close()
        # Now: at interpreter exit, when an LLM nobody closed closes, some Pythons can start no thread.
        threading.Thread(target=device._watch, name="cpu-worker-watch", daemon=True).start()
        try:
            await device._loop.create_connection(lambda: device, sock=ours)
            device._transport.write(encode(opening))
            await device._ready
        except BaseException:
            await device.close()
            raise
        return device

    @property
    def info(self) -> DeviceInfo:
        return self._info

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def forward(self, plan: StepPlan) -> None:
        if not self._free:
            raise RuntimeError(f"step {plan.step}: {SLOTS} steps are in flight already")
        index = self._free.popleft()
        self._launched = index, plan
        slot, entries, tokens = self._ring.slots[index], len(plan.rows), len(plan.token_ids)
        slot["rows"][:entries] = plan.rows
        slot["starts"][:entries] = plan.starts
        slot["num_tokens"][:entries] = plan.num_tokens
        slot["token_ids"][:tokens] = plan.token_ids
        if plan.prompt_targets is not None:
            slot["prompt_targets"][:tokens] = plan.prompt_targets
        message = Forward(
            slot=index,
            step=plan.step,
            entries=entries,
            tokens=tokens,
            has_targets=plan.prompt_targets is not None,
            row_states=plan.row_states,
            block_updates=plan.block_updates,
            block_copies=plan.block_copies,
        )
        self._send(message)

    def sample(self, batch: SampleBatch) -> FutureTicket:
        if self._launched is None or self._launched[1].step != batch.step:
            raise RuntimeError(f"step {batch.step}: sample without its forward")
        index, self._launched = self._launched[0], None
        slot, count = self._ring.slots[index], len(batch.entries)
        slot["entries"][:count] = batch.entries
        slot["sampled_rows"][:count] = batch.rows
        if batch.masks is not None:
            slot["masks"][:count] = batch.masks
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._waiting[index] = future
        self._send(Sample(index, batch.step, count, batch.masks is not None))
        if self._fault is not None:
            self._settle(index).set_exception(self._fault)
        return FutureTicket(future)

    def on_failure(self, tell: Callable[[EngineError], None]) -> None:
        self._tell = tell

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._transport.close()
        await self._gone
        self._ring.close()

    def _send(self, message: Forward | Sample) -> None:
        if self._fault is None:
            self._transport.write(encode(message))

    def _settle(self, index: int) -> asyncio.Future[StepResult]:
        self._free.append(index)
        return self._waiting.pop(index)

    # -- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are not subclasses

    def data_received(self, data: bytes) -> None:
        for message in self._messages.feed(data):
            self._receive(message)

    def _receive(self, message: Any) -> None:
        match message:
            case Result():
                result = self._read_result(message)
                self._settle(message.slot).set_result(result)
            case Failed(slot, reason):
                self._settle(slot).set_exception(StepFault(f"cpu device: {reason}"))
            case Ready():
                self._ready.set_result(None)
            case OpenFailed(reason, path, problems):
                self._fault = ConfigError(reason) if path is None else CheckpointError(path, problems)

    def _read_result(self, message: Result) -> StepResult:
        slot = self._ring.slots[message.slot]
        return StepResult(
            step=message.step,
            token_ids=slot["sampled_ids"][: message.entries].copy(),
            faulted=slot["faulted"][: message.entries].copy(),
            logprobs=read_logprobs(slot, "sampled", message.logprobs),
            prompt_logprobs=read_logprobs(slot, "prompt", message.prompt_logprobs),
            device_seconds=message.device_seconds,
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._reaper = self._loop.create_task(self._reap())

    def _watch(self) -> None:
        code = self._process.wait()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._exited.set_result, code)

    async def _reap(self) -> None:
        """Learn why the worker ended and tell everybody who waits for it."""
        try:
            code = await asyncio.wait_for(asyncio.shield(self._exited), _EXIT_SECONDS)
        except TimeoutError:
            self._process.kill()
            code = await self._exited
        if self._fault is None:
            self._fault = DeviceFault("the cpu device is closed" if self._closing else _reason(code))
        for index in list(self._waiting):
            self._settle(index).set_exception(self._fault)
        if not self._ready.done():
            self._ready.set_exception(self._fault)
        elif not self._closing and isinstance(self._fault, EngineError):
            self._tell(self._fault)
        self._gone.set_result(None)


def _start_worker(socket_fd: int, ring_fd: int) -> "subprocess.Popen[bytes]":
    """A module of its own, not multiprocessing's spawn: a user's script needs no `__main__` guard.

    -P keeps the working directory off the path, where a folder named engine/ would be found first.
    """
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.devices.cpu.worker", str(socket_fd), str(ring_fd), str(os.getpid())],
        pass_fds=(socket_fd, ring_fd),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )


def _reason(code: int) -> str:
    if code < 0:
        hint = "; the system may be out of memory" if code == -signal.SIGKILL else ""
        return f"the cpu worker was killed by {signal.Signals(-code).name}{hint}"
    return f"the cpu worker ended with exit code {code}; its error is on stderr"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
