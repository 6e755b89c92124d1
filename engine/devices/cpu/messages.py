"""Control messages between the parent and its worker: frozen values, pickled, with a length in front.

Arrays don't travel here but in the ring; what does is small (differences of a plan, counts, errors).
Both ends are the same program, started one from the other, so pickle is no boundary of trust.
"""

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import LoadFormat
from engine.devices.cpu.model import ModelShape
from engine.devices.cpu.ring import RingLimits
from engine.plan import BlockCopy, BlockUpdate, RowState

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Open:
    """To the worker, first: what to load."""

    shape: ModelShape
    path: Path
    load_format: LoadFormat
    seed: int
    limits: RingLimits


@dataclass(frozen=True, slots=True)
class Ready:
    """From the worker: steps may come."""


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """From the worker: why it ends. `path` and `problems` are a CheckpointError's."""

    reason: str
    path: Path | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Forward:
    """To the worker: a plan, its arrays being the first `entries` and `tokens` elements in the slot."""

    slot: int
    step: int
    entries: int
    tokens: int
    has_targets: bool
    row_states: tuple[RowState, ...]
    block_updates: tuple[BlockUpdate, ...]
    block_copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """To the worker: sample the first `entries` of the slot's `entries`, `sampled_rows` and perhaps `masks`."""

    slot: int
    step: int
    entries: int
    has_masks: bool


@dataclass(frozen=True, slots=True)
class Result:
    """From the worker: the slot holds a StepResult of `entries` ids and log-probability tables of these shapes."""

    slot: int
    step: int
    entries: int
    logprobs: tuple[int, int] | None
    prompt_logprobs: tuple[int, int] | None
    device_seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """From the worker: the step raised; the worker goes on."""

    slot: int
    reason: str


def encode(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Messages out of a stream of bytes cut anywhere."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            message = pickle.loads(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield message
