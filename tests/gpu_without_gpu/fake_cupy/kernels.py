"""RawModule through the executor: kernels that are queued on streams and run on the CPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu_without_gpu import executor
from tests.gpu_without_gpu.fake_cupy.arrays import MemoryPointer, ndarray
from tests.gpu_without_gpu.fake_cupy.device import CUDADriverError, gpu
from tests.gpu_without_gpu.fake_cupy.streams import Stream, current_stream

_WITHOUT_OPT_IN = 48 << 10
_seeds = itertools.count(1)


class RawModule:
    """As `cupy.RawModule`, from source (`code`) or a file of PTX (`path`)."""

    def __init__(
        self,
        *,
        code: str | None = None,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        name_expressions: Sequence[str] | None = None,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("exactly one of `code` and `path` is needed")
        self._code, self._path, self._options, self._expressions = code, path, options, tuple(name_expressions or ())

    @functools.cached_property
    def _module(self) -> executor.Module:
        arch = f"compute_{gpu().settings.compute_capability}"
        if self._code is not None:
            options = (*self._options, "-ftz=true")  # CuPy always adds it
            return executor.compile(self._code, options, arch, name_expressions=self._expressions)
        assert self._path is not None
        contents = Path(self._path).read_bytes()
        if contents.startswith(b"\x7fELF"):
            raise CUDADriverError("the double runs PTX, not cubins: compile for an architecture named compute_XX")
        return executor.load_ptx(contents.decode().rstrip("\0"), arch)

    def compile(self, log_stream: Any = None) -> None:
        _ = self._module

    def get_function(self, name: str) -> Function:
        return Function(self._module.kernel(name))


class Function:
    """As `cupy.cuda.Function`."""

    def __init__(self, kernel: executor.Kernel) -> None:
        self._kernel = kernel
        self._max_dynamic = _WITHOUT_OPT_IN - kernel.info.static_shared

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._max_dynamic

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes: int) -> None:
        limit = self._kernel.module.shared_limit - self._kernel.info.static_shared
        if nbytes > limit:
            raise CUDADriverError(f"CUDA_ERROR_INVALID_VALUE: {nbytes} bytes of shared memory, at most {limit}")
        self._max_dynamic = nbytes

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: Stream | None = None,
    ) -> None:
        """Queue a launch. Scalars are taken now, as a captured graph would.

        Raises TypeError for an argument that is neither an array nor a NumPy scalar, ValueError for an empty grid,
        which CuPy would take for one block.
        """
        if shared_mem > self._max_dynamic:
            raise CUDADriverError(f"CUDA_ERROR_INVALID_VALUE: {shared_mem} bytes of shared memory were not opted into")
        if 0 in (*grid, *block):
            raise ValueError(f"{self._kernel.info.name}: a launch without work, which CuPy would make one block")
        packed = [_packed(self._kernel, i, arg) for i, arg in enumerate(args)]
        self._kernel.check(grid, block, packed, shared_mem)
        (stream or current_stream()).push(lambda: self._run(grid, block, packed, shared_mem))

    def _run(self, grid: Sequence[int], block: Sequence[int], args: list[np.generic], shared_mem: int) -> None:
        settings = gpu().settings
        schedule = settings.schedule or executor.random_schedule(next(_seeds))
        gpu().launches[self._kernel.info.name] += 1
        self._kernel.launch(grid, block, args, smem=shared_mem, schedule=schedule, check_races=settings.check_races)


def _packed(kernel: executor.Kernel, position: int, arg: Any) -> np.generic:
    if isinstance(arg, ndarray):
        return np.uint64(arg.data.ptr)
    if isinstance(arg, MemoryPointer):
        return np.uint64(arg.ptr)
    if isinstance(arg, np.generic):
        return arg
    raise TypeError(
        f"{kernel.info.name}: argument {position} is {type(arg).__name__}; CuPy would pass a Python number with a size "
        "of its own choosing: pass an array or a NumPy scalar"
    )
