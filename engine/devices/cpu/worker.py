"""The worker process: `python -m engine.devices.cpu.worker SOCKET_FD RING_FD PARENT_PID`, started by `device.py` alone.

Takes messages in order, one step at a time; a step that raises is answered with its reason and the next one runs.
It ends when its socket does: with its parent, however that ends, and at once where the kernel can tell it (Linux).
"""

import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from engine.devices.cpu.messages import Decoder, Failed, Forward, Open, OpenFailed, Ready, Result, Sample, encode
from engine.devices.cpu.ring import Ring, write_logprobs
from engine.errors import EngineError
from engine.plan import SampleBatch, StepPlan
from loader.errors import CheckpointError

_PR_SET_PDEATHSIG = 1
_RECEIVE_BYTES = 1 << 18


def main() -> None:
    _end_with_parent()
    sys.modules["scipy"] = None  # type: ignore[assignment]  # Numba imports it if it can, 0.3 s; no kernel needs it
    connection = socket.socket(fileno=int(sys.argv[1]))
    messages = _receive(connection)
    opening = next(messages, None)
    if opening is None:
        return
    with suppress(ConnectionError):  # the parent has gone, in the middle of a step or of the load
        _serve(connection, opening, messages)


def _serve(connection: socket.socket, opening: Open, messages: Iterator[Any]) -> None:
    try:
        worker = _Worker(opening, int(sys.argv[2]))
    except CheckpointError as error:
        connection.sendall(encode(OpenFailed(str(error), error.path, error.problems)))
    except EngineError as error:
        connection.sendall(encode(OpenFailed(str(error))))
    else:
        connection.sendall(encode(Ready()))
        for message in messages:
            answer = worker.handle(message)
            if answer is not None:
                connection.sendall(encode(answer))


class _Worker:
    """The executor behind messages."""

    def __init__(self, opening: Open, ring_fd: int) -> None:
        # Numba and NumKong take half a second to import; an error before them should not wait
        from engine.devices.cpu.executor import CpuExecutor
        from loader.progress import byte_progress
        from loader.weights import dummy_weights, plan_weights

        decoder = opening.shape.decoder
        if opening.load_format == "dummy":
            source: Any = dummy_weights(decoder, opening.seed)
        else:
            source = plan_weights(opening.path, decoder)
        with byte_progress("Loading weights", source.nbytes) as advance:
            self._executor = CpuExecutor(opening.shape, source, advance)
        self._executor.warm_up()
        self._ring = Ring(opening.limits, ring_fd)
        self._forward_error: str | None = None

    def handle(self, message: Forward | Sample) -> Result | Failed | None:
        try:
            if isinstance(message, Forward):
                self._forward_error = None
                self._executor.forward(self._plan(message))
                return None
            if self._forward_error is None:
                return self._sample(message)
            return Failed(message.slot, self._forward_error)
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            if isinstance(message, Sample):
                return Failed(message.slot, reason)
            self._forward_error = reason
            return None

    def _plan(self, message: Forward) -> StepPlan:
        slot, entries, tokens = self._ring.slots[message.slot], message.entries, message.tokens
        return StepPlan(
            step=message.step,
            rows=slot["rows"][:entries],
            starts=slot["starts"][:entries],
            num_tokens=slot["num_tokens"][:entries],
            token_ids=slot["token_ids"][:tokens],
            prompt_targets=slot["prompt_targets"][:tokens] if message.has_targets else None,
            row_states=message.row_states,
            block_updates=message.block_updates,
            block_copies=message.block_copies,
        )

    def _sample(self, message: Sample) -> Result:
        slot, count = self._ring.slots[message.slot], message.entries
        masks = slot["masks"][:count] if message.has_masks else None
        batch = SampleBatch(message.step, slot["entries"][:count], slot["sampled_rows"][:count], masks)
        result = self._executor.sample(batch)
        slot["sampled_ids"][:count] = result.token_ids
        slot["faulted"][:count] = result.faulted
        sampled = write_logprobs(slot, "sampled", result.logprobs)
        prompt = write_logprobs(slot, "prompt", result.prompt_logprobs)
        return Result(message.slot, message.step, count, sampled, prompt, result.device_seconds)


def _receive(connection: socket.socket) -> Iterator[Any]:
    decoder = Decoder()
    while True:
        try:
            data = connection.recv(_RECEIVE_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        yield from decoder.feed(data)


def _end_with_parent() -> None:
    """Ctrl-C and a service manager's SIGTERM are for the parent, which drains; the worker outlives them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[3]):
            sys.exit()  # the parent ended before the kernel was told


if __name__ == "__main__":
    main()
