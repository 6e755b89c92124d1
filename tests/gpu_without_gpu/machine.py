"""The runtime library from Python: device memory, and one launch at a time.

Device memory lies in the library's arena, every allocation on pages of its own and filled with 0xff (a NaN in every
float format) until written. The library runs one launch at a time; `launch` holds a lock.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gpu_without_gpu import build

POISON = 0xFF
_LOCK = threading.Lock()


class _Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32))


class _Region(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("end", ctypes.c_uint64))


class _Request(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("param_bytes", ctypes.c_uint64),
        ("site_lines", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_uint32),
        ("grid", _Dim3),
        ("block", _Dim3),
        ("dynamic_shared", ctypes.c_uint32),
        ("total_shared", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32),
        ("async_copies", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("check_races", ctypes.c_uint32),
        ("profiles", ctypes.c_uint32),
    )


class _Traffic(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("loaded", "stored", "unique_loaded", "unique_stored"))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a launch moved in one allocation: summed over threads, and each byte counted once."""

    loaded: int = 0
    stored: int = 0
    unique_loaded: int = 0
    unique_stored: int = 0


class _Profile(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("shared_accesses", "bank_conflicts", "sectors_loaded", "sectors_stored")
    )


@dataclass(frozen=True, slots=True)
class Profile:
    """What hardware would do with a launch's accesses, warp by warp.

    Attributes:
        shared_accesses: warp instructions on shared memory.
        bank_conflicts: additional passes that they need.
        sectors_loaded, sectors_stored: 32-byte sectors of global memory, each counted once per warp instruction.
    """

    shared_accesses: int
    bank_conflicts: int
    sectors_loaded: int
    sectors_stored: int


@functools.cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build.runtime_library()), mode=ctypes.RTLD_GLOBAL)
    lib.gpu_allocate.argtypes = (ctypes.c_uint64,)
    lib.gpu_allocate.restype = ctypes.c_uint32
    lib.gpu_address.argtypes = (ctypes.c_uint32,)
    lib.gpu_address.restype = ctypes.c_uint64
    lib.gpu_free.argtypes = (ctypes.c_uint32,)
    lib.gpu_set_read_only.argtypes = (ctypes.c_uint32, ctypes.c_uint32)
    lib.gpu_traffic.argtypes = (ctypes.c_uint32, ctypes.POINTER(_Traffic))
    lib.gpu_profile.argtypes = (ctypes.POINTER(_Profile),)
    lib.gpu_error.restype = ctypes.c_char_p
    lib.gpu_launch.argtypes = (ctypes.POINTER(_Request),)
    return lib


class Allocation:
    """Device memory of `nbytes` bytes; freed with the object. `bytes` is its contents as a NumPy view."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.id = library().gpu_allocate(nbytes)
        if not self.id:
            raise MemoryError(f"the executor's arena has no {nbytes} bytes left")
        self.ptr: int = library().gpu_address(self.id)
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.ptr))
        self.bytes[...] = POISON

    def set_read_only(self, read_only: bool) -> None:
        library().gpu_set_read_only(self.id, read_only)

    def traffic(self) -> Traffic:
        """What the last launch did here."""
        raw = _Traffic()
        library().gpu_traffic(self.id, raw)
        return Traffic(raw.loaded, raw.stored, raw.unique_loaded, raw.unique_stored)

    def __del__(self) -> None:
        if getattr(self, "id", 0):
            library().gpu_free(self.id)
            self.id = 0


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any  # the kernel's C function
    params: bytes
    site_lines: NDArray[np.uint32]
    shared: tuple[tuple[int, int], ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared: int
    total_shared: int
    schedule: int
    async_copies: int
    seed: int
    check_races: bool
    profiles: bool


def launch(what: Launch) -> str | None:
    """Run a launch to its end. Returns what went wrong, with `{site:N}` for places and `{allocation:N}` for memory."""
    params = ctypes.create_string_buffer(what.params, max(len(what.params), 1))
    regions = (_Region * len(what.shared))(*(_Region(begin, end) for begin, end in what.shared))
    request = _Request(
        ctypes.cast(what.kernel, ctypes.c_void_p).value, ctypes.addressof(params), len(what.params),
        what.site_lines.ctypes.data, ctypes.addressof(regions), len(what.shared),
        _Dim3(*what.grid), _Dim3(*what.block), what.dynamic_shared, what.total_shared,
        what.schedule, what.async_copies, what.seed, what.check_races, what.profiles,
    )  # fmt: skip
    with _LOCK:
        failed = library().gpu_launch(request)
        return library().gpu_error().decode() if failed else None


def profile() -> Profile:
    """Of the last launch, which must have asked for it."""
    raw = _Profile()
    library().gpu_profile(raw)
    return Profile(raw.shared_accesses, raw.bank_conflicts, raw.sectors_loaded, raw.sectors_stored)
