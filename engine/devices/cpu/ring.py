"""The ring of shared slots through which plans go to the worker and results come back.

One anonymous memory file that both processes map: it has no name, so it goes when they go, however they end.
A slot belongs to the parent until its forward message is sent, to the worker until its result message is sent.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.plan import TokenLogprobs

SLOTS = 4
"""Two steps in flight, one being written, one being read."""


@dataclass(frozen=True, slots=True)
class RingLimits:
    """Sizes that fix a slot's layout: rows, tokens, alternatives per token and vocabulary, at most."""

    rows: int
    tokens: int
    top: int
    vocab: int

    @property
    def mask_words(self) -> int:
        return -(-self.vocab // 32)

    def fields(self) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
        """Name to dtype and shape of a slot's arrays, in order."""
        rows, tokens, i32, f32 = (self.rows,), (self.tokens,), np.int32, np.float32
        fields: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "rows": (i32, rows),
            "starts": (i32, rows),
            "num_tokens": (i32, rows),
            "token_ids": (i32, tokens),
            "prompt_targets": (i32, tokens),
            "entries": (i32, rows),
            "sampled_rows": (i32, rows),
            "masks": (np.uint32, (self.rows, self.mask_words)),
            "sampled_ids": (i32, rows),
            "faulted": (np.bool_, rows),
        }
        for prefix, (size,) in (("sampled", rows), ("prompt", tokens)):
            fields[f"{prefix}_logprobs"] = (f32, (size,))
            fields[f"{prefix}_ranks"] = (i32, (size,))
            fields[f"{prefix}_top_ids"] = (i32, (size * self.top,))
            fields[f"{prefix}_top_logprobs"] = (f32, (size * self.top,))
        return fields


class Ring:
    """SLOTS dictionaries of arrays over one shared mapping.

    Attributes:
        fd: of the memory file, inheritable by the worker.
        slots: [SLOTS] name -> array, as in RingLimits.fields.
    """

    def __init__(self, limits: RingLimits, fd: int | None = None) -> None:
        sizes = {
            name: _aligned(np.dtype(kind).itemsize * int(np.prod(s))) for name, (kind, s) in limits.fields().items()
        }
        slot_nbytes = sum(sizes.values())
        self.fd = _memory_file(SLOTS * slot_nbytes) if fd is None else fd
        self._map = mmap.mmap(self.fd, SLOTS * slot_nbytes)
        self.slots: list[dict[str, NDArray[Any]]] = []
        for slot in range(SLOTS):
            offset, arrays = slot * slot_nbytes, {}
            for name, (kind, shape) in limits.fields().items():
                arrays[name] = np.ndarray(shape, kind, self._map, offset)
                offset += sizes[name]
            self.slots.append(arrays)

    def close(self) -> None:
        """Close the file; the mapping goes with the last array over it."""
        os.close(self.fd)


def write_logprobs(slot: dict[str, NDArray[Any]], prefix: str, table: TokenLogprobs | None) -> tuple[int, int] | None:
    """Copy a table into a slot; its shape, which `read_logprobs` needs."""
    if table is None:
        return None
    count, width = table.top_ids.shape
    slot[f"{prefix}_logprobs"][:count] = table.logprobs
    slot[f"{prefix}_ranks"][:count] = table.ranks
    slot[f"{prefix}_top_ids"][: count * width] = table.top_ids.ravel()
    slot[f"{prefix}_top_logprobs"][: count * width] = table.top_logprobs.ravel()
    return count, width


def read_logprobs(slot: dict[str, NDArray[Any]], prefix: str, shape: tuple[int, int] | None) -> TokenLogprobs | None:
    """A copy of what `write_logprobs` wrote."""
    if shape is None:
        return None
    count, width = shape
    return TokenLogprobs(
        slot[f"{prefix}_logprobs"][:count].copy(),
        slot[f"{prefix}_ranks"][:count].copy(),
        slot[f"{prefix}_top_ids"][: count * width].reshape(shape).copy(),
        slot[f"{prefix}_top_logprobs"][: count * width].reshape(shape).copy(),
    )


def _memory_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("engine-ring")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
