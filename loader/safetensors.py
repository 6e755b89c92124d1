"""One safetensors file: a checked header over a memory map, tensors as read-only views.

Format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length,
a JSON object, then the data section, which the tensors cover without holes or overlaps.
Everything the header says is checked against the file before a view is made, and nothing
is allocated from a number that the file has not already backed with bytes.
Read next: `loader/weights.py`, which assigns these tensors to parameters.
"""

import json
import math
import mmap
import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from loader.errors import CheckpointError, shown

MAX_HEADER_BYTES = 100_000_000
"""The reference implementation's limit; a header of about a million tensors reaches it."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}

MAX_RANK, MAX_ELEMENTS = 8, 1 << 48
"""Of a shape. One with a size of 0 needs no bytes, so the file does not bound its others."""

_LFS_POINTER = b"version "
"""First 8 bytes of a git-LFS pointer; as a length they would be 2.3e18."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `begin` and `end` are byte offsets into the data section."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An open, checked file. Views keep the memory map alive.

    Attributes:
        entries: by tensor name, in the header's order.
        data_offset: where the data section begins in the file.
    """

    path: Path
    entries: Mapping[str, TensorEntry]
    data_offset: int
    _map: mmap.mmap

    def tensor(self, name: str) -> NDArray[Any]:
        """Read-only array in the file's dtype; a copy only where the file misaligns it."""
        entry = self.entries[name]
        view: NDArray[Any] = np.ndarray(entry.shape, entry.dtype, self._map, self.data_offset + entry.begin)
        if not view.flags.aligned:
            view = view.copy()
            view.flags.writeable = False
        return view


def open_safetensors(path: Path) -> SafetensorsFile:
    """Map and check a file. Raises CheckpointError that names everything wrong with it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(path, file, size)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(path, [f"cannot be read: {error.strerror or error}"]) from error
    data_offset = 8 + len(header)
    entries = _parse_header(path, header, size - data_offset)
    return SafetensorsFile(path, entries, data_offset, mapped)


def _read_header(path: Path, file: BinaryIO, size: int) -> bytes:
    prefix = file.read(8)
    if prefix == _LFS_POINTER:
        raise CheckpointError(path, ["is a git-LFS pointer, not the weights; fetch them with `git lfs pull`"])
    if size < 8:
        raise CheckpointError(path, [f"truncated: {size} bytes, a safetensors file has at least 8"])
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            path, [f"header of {length} bytes exceeds the limit of {MAX_HEADER_BYTES}, or this is no safetensors file"]
        )
    if length > size - 8:
        raise CheckpointError(path, [f"truncated: the header should have {length} bytes, the file has {size - 8} left"])
    return file.read(length)


def _parse_header(path: Path, header: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    problems: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) != len(pairs):
            names = Counter(name for name, _ in pairs)
            problems.extend(f"{name}: listed more than once in the header" for name, n in names.items() if n > 1)
        return seen

    try:
        raw = json.loads(header.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, [f"header is not JSON: {error}"]) from error
    if not isinstance(raw, dict):
        raise CheckpointError(path, [f"header is a JSON {type(raw).__name__}, not an object"])
    raw.pop("__metadata__", None)
    entries: dict[str, TensorEntry] = {}
    for name, value in raw.items():
        entry = _parse_entry(value)
        if isinstance(entry, str):
            problems.append(f"{name}: {entry}")
        else:
            entries[name] = entry
    if not problems:
        problems.extend(_coverage_problems(entries, data_bytes))
    if problems:
        raise CheckpointError(path, problems)
    return entries


def _parse_entry(value: Any) -> TensorEntry | str:
    """The entry, or what is wrong with it."""
    if not isinstance(value, dict):
        return f"expected an object, found {shown(value)}"
    name, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        return f"dtype {shown(name)} is not supported, expected one of {', '.join(DTYPES)}"
    if not _are_sizes(shape):
        return f"shape {shown(shape)} is not a list of sizes"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return f"data_offsets {shown(offsets)} is not a pair of offsets"
    begin, end = offsets
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        return f"{name} {shape} needs {needed} bytes, data_offsets {offsets} hold {end - begin}"
    if len(shape) > MAX_RANK or math.prod(filter(None, shape)) > MAX_ELEMENTS:
        return f"a shape has at most {MAX_RANK} sizes, and without those of 0 their product is at most {MAX_ELEMENTS}"
    return TensorEntry(dtype, tuple(shape), begin, end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)


def _coverage_problems(entries: Mapping[str, TensorEntry], data_bytes: int) -> list[str]:
    end = max((entry.end for entry in entries.values()), default=0)
    if end > data_bytes:
        return [f"truncated: the file holds {data_bytes} of the {end} bytes of its tensors; fetch it again"]
    problems, covered = [], 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < covered:
            problems.append(f"{name}: begins at {entry.begin}, inside the tensor that ends at {covered}")
        elif entry.begin > covered:
            problems.append(f"{name}: begins at {entry.begin}, leaving a hole after {covered}")
        covered = max(covered, entry.end)
    if covered < data_bytes:
        problems.append(f"{data_bytes - covered} bytes after the last tensor belong to none")
    return problems
