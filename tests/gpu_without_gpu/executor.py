"""Compile CUDA C and run it on the CPU.

    module = executor.compile(source, ["-I" + cuda_src], arch="compute_80")
    report = module.kernel("rms_norm").launch((rows,), (256,), (x, weight, out, np.int32(n)), smem=0)

NVRTC gives PTX, translate.py gives C++, g++ gives a shared object, and the runtime library executes it, a fiber per
CUDA thread, with every access checked. Arrays are copied to device memory and back; read-only ones must stay as they
are. An error in the kernel raises LaunchError and leaves the arrays untouched.
What is modelled and what is not: docs/gpu-without-gpu.md.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gpu_without_gpu import build, machine, parser, ptx, translate
from tests.gpu_without_gpu.build import CompileError
from tests.gpu_without_gpu.machine import Allocation, Profile, Traffic
from tests.gpu_without_gpu.ptx import PtxError

__all__ = [
    "SCHEDULES",
    "Allocation",
    "AsyncCopies",
    "CompileError",
    "Kernel",
    "LaunchError",
    "LaunchReport",
    "Module",
    "Profile",
    "PtxError",
    "Schedule",
    "Traffic",
    "compile",
    "compile_file",
    "load_ptx",
    "poisoned",
    "random_schedule",
]  # fmt: skip

# Shared memory that one block may use, with opt-in, by compute capability.
SHARED_LIMITS = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


class LaunchError(Exception):
    """The kernel did something wrong: the message names kernel, block, thread and source line."""


class Order(enum.IntEnum):
    IN_ORDER = 0
    REVERSED = 1
    RANDOM = 2


class AsyncCopies(enum.IntEnum):
    """When a cp.async moves its bytes: when issued, when waited for, or either at random."""

    EARLY = 0
    LATE = 1
    RANDOM = 2


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which thread and block runs next, and when asynchronous copies happen."""

    order: Order = Order.IN_ORDER
    async_copies: AsyncCopies = AsyncCopies.LATE
    seed: int = 0


def random_schedule(seed: int) -> Schedule:
    return Schedule(Order.RANDOM, AsyncCopies.RANDOM, seed)


# Three schedules that together have found every deleted barrier and wait so far.
LAUNCHED: set[str] = set()
"""Every kernel this process has run; tests/cuda/conftest.py compares it with cuda_src/."""

SCHEDULES = (
    Schedule(Order.IN_ORDER, AsyncCopies.LATE),
    Schedule(Order.REVERSED, AsyncCopies.EARLY),
    Schedule(Order.RANDOM, AsyncCopies.RANDOM, seed=1),
)


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """What a launch did: per array argument, by its position, the bytes moved; and the profile, if asked for."""

    arrays: dict[int, Traffic] = field(default_factory=dict)
    profile: Profile | None = None


def poisoned(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An output array filled with 0xff bytes: NaN in every float type."""
    out = np.empty(shape, dtype)
    out.view(np.uint8)[...] = machine.POISON
    return out


@functools.cache
def _load(text: str, names: tuple[tuple[str, str], ...], arch: str) -> Module:
    return Module(translate.translate(parser.parse(text)), dict(names), arch)


def compile(
    source: str,
    options: Iterable[str] = (),
    arch: str = "compute_80",
    *,
    name: str = "kernel.cu",
    name_expressions: Iterable[str] = (),
) -> Module:
    """Compile CUDA C++. `options` are NVRTC's; `-lineinfo` is added, and an architecture that gives PTX.

    Raises CompileError from NVRTC, PtxError for PTX that the executor does not model.
    """
    text, names = build.compile_ptx(source, tuple(options), arch, name, name_expressions)
    return _load(text, tuple(names.items()), arch)


def compile_file(path: Path, options: Iterable[str] = (), arch: str = "compute_80", **kwargs: Any) -> Module:
    """Compile a file; its own folder is searched for includes."""
    return compile(path.read_text(), (f"-I{path.parent}", *options), arch, name=str(path), **kwargs)


def load_ptx(text: str, arch: str = "compute_80") -> Module:
    """A module from PTX text."""
    return _load(text, (), arch)


class Module:
    """Kernels of one compilation unit, with their module variables in device memory. Kernels build on first use."""

    def __init__(self, translation: translate.Translation, names: dict[str, str], arch: str) -> None:
        self.translation = translation
        self.shared_limit = SHARED_LIMITS[int(re.sub(r"\D", "", arch))] * 1024
        self._names = names
        self._kernels: dict[str, Kernel] = {}
        self.variables: dict[str, Allocation] = {}
        for variable in translation.variables:
            memory = Allocation(max(len(variable.initial), 1))
            memory.bytes[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
            memory.set_read_only(variable.constant)
            self.variables[variable.name] = memory
        numbers: dict[tuple[str, ...], int] = {}  # without line information, equal instructions pass for one
        keys = [s.lines if s.has_lines else (s.ptx,) for s in translation.sites]
        self.site_lines = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.uint32)

    @property
    def kernel_names(self) -> tuple[str, ...]:
        return tuple(self.translation.kernels)

    def kernel(self, name: str) -> Kernel:
        """A kernel by its `extern "C"` name or its name expression."""
        mangled = self._names.get(name, name)
        if mangled not in self.translation.kernels:
            raise KeyError(f"no kernel {name!r}; there are {', '.join(self.kernel_names)}")
        if mangled not in self._kernels:
            self._kernels[mangled] = Kernel(self, self.translation.kernels[mangled])
        return self._kernels[mangled]


class Kernel:
    """One `__global__` function."""

    def __init__(self, module: Module, info: translate.Kernel) -> None:
        self.module = module
        self.info = info
        machine.library()  # resolves the symbols of the kernel's
        library = ctypes.CDLL(str(build.kernel_library(module.translation.units[info.name], info.name)))
        self._function = getattr(library, f"kernel_{ptx.identifier(info.name)}")
        for name, memory in module.variables.items():
            ctypes.c_uint64.in_dll(library, f"v_{ptx.identifier(name)}").value = memory.ptr

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[NDArray[Any] | np.generic | Allocation],
        *,
        smem: int = 0,
        schedule: Schedule = SCHEDULES[0],
        check_races: bool = True,
        profile: bool = False,
    ) -> LaunchReport:
        """Run the kernel to its end.

        Args:
            args: arrays (C-contiguous; written back unless read-only), device memory, or NumPy scalars of the
                parameter's size. A Python number raises TypeError: CuPy would pass it with a size of its own choosing.
            smem: dynamic shared memory in bytes.
            check_races: without it a launch is up to twice as fast, and bounds are still checked.
            profile: count bank conflicts and sectors; several times slower.

        Raises LaunchError for what the kernel did, TypeError and ValueError for how it was launched.
        """
        LAUNCHED.add(self.info.name)
        grid3, block3 = self.check(grid, block, args, smem)
        arrays = _DeviceArrays(args)
        error = machine.launch(
            machine.Launch(
                kernel=self._function,
                params=self._pack(arrays, args),
                site_lines=self.module.site_lines,
                shared=(*self.info.shared, (self.info.dynamic_base, self.info.dynamic_base + smem)),
                grid=grid3,
                block=block3,
                dynamic_shared=smem,
                total_shared=self.info.static_shared + smem,
                schedule=schedule.order,
                async_copies=schedule.async_copies,
                seed=schedule.seed,
                check_races=check_races,
                profiles=profile,
            )
        )
        if error is not None:
            raise LaunchError(f"{self.info.name}: {self._located(error, arrays)}")
        arrays.copy_back()
        traffic = {i: memory.traffic() for i, memory in arrays.by_argument.items()}
        return LaunchReport(traffic, machine.profile() if profile else None)

    def check(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], smem: int
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The full grid and block of a launch. Raises TypeError and ValueError for one that could not be."""
        block3 = _three(block)
        threads = block3[0] * block3[1] * block3[2]
        if threads > self.info.max_threads:
            raise ValueError(f"{self.info.name}: {threads} threads per block, at most {self.info.max_threads}")
        total = self.info.static_shared + smem
        if total > self.module.shared_limit:
            raise ValueError(f"{self.info.name}: {total} bytes of shared memory, at most {self.module.shared_limit}")
        params = self.info.params
        if len(args) != len(params):
            raise TypeError(f"{self.info.name}: {len(args)} arguments, it takes {len(params)}")
        for i, (arg, param) in enumerate(zip(args, params, strict=True)):
            nbytes = arg.nbytes if isinstance(arg, np.generic) else 8
            if nbytes != param.nbytes:
                raise TypeError(f"{self.info.name}: argument {i} has {nbytes} bytes, the parameter has {param.nbytes}")
        return _three(grid), block3

    def _pack(self, arrays: _DeviceArrays, args: Sequence[NDArray[Any] | np.generic | Allocation]) -> bytes:
        params = self.info.params
        packed = bytearray(params[-1].offset + params[-1].nbytes if params else 0)
        for i, (arg, param) in enumerate(zip(args, params, strict=True)):
            value = arg.tobytes() if isinstance(arg, np.generic) else arrays.address(i).to_bytes(8, "little")
            packed[param.offset : param.offset + param.nbytes] = value
        return bytes(packed)

    def _located(self, error: str, arrays: _DeviceArrays) -> str:
        def site(match: re.Match[str]) -> str:
            return str(self.module.translation.sites[int(match[1])])

        def allocation(match: re.Match[str]) -> str:
            position = next((i for i, m in arrays.by_argument.items() if m.id == int(match[1])), None)
            return "" if position is None else f"(argument {position})"

        return re.sub(r"\{allocation:(\d+)\}", allocation, re.sub(r"\{site:(\d+)\}", site, error))


class _DeviceArrays:
    """The launch's arrays in device memory. The same array passed twice is one allocation."""

    def __init__(self, args: Sequence[NDArray[Any] | np.generic | Allocation]) -> None:
        self.by_argument: dict[int, Allocation] = {}
        self._hosts: dict[int, tuple[NDArray[Any], Allocation]] = {}
        for i, arg in enumerate(args):
            if isinstance(arg, np.ndarray):
                self.by_argument[i] = self._place(arg, i)
            elif isinstance(arg, Allocation):
                self.by_argument[i] = arg
            elif not isinstance(arg, np.generic):
                raise TypeError(f"argument {i} is {type(arg).__name__}; pass an array or a NumPy scalar")

    def _place(self, array: NDArray[Any], position: int) -> Allocation:
        if not array.flags.c_contiguous:
            raise ValueError(f"argument {position} is not C-contiguous")
        address = array.ctypes.data
        for other, memory in self._hosts.values():
            if other.ctypes.data == address and other.nbytes == array.nbytes:
                return memory
            if np.may_share_memory(other, array):
                raise ValueError(f"argument {position} overlaps another one")
        memory = Allocation(array.nbytes)
        memory.bytes[...] = np.frombuffer(array.tobytes(), np.uint8)
        memory.set_read_only(not array.flags.writeable)
        self._hosts[position] = (array, memory)
        return memory

    def address(self, position: int) -> int:
        return self.by_argument[position].ptr

    def copy_back(self) -> None:
        for array, memory in self._hosts.values():
            if array.flags.writeable:
                array.reshape(-1).view(np.uint8)[...] = memory.bytes


def _three(shape: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*shape, 1, 1)[:3]
    if len(shape) > 3 or min(x, y, z) < 1:
        raise ValueError(f"a grid or block has one to three positive sizes, not {tuple(shape)}")
    return int(x), int(y), int(z)
