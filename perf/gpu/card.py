"""Kernels on the GPU as functions of NumPy arrays: uploaded, launched, brought back."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.devices.cuda.registry import Kernel, KernelRegistry


class CardRegistry(KernelRegistry):
    """Launches wait and write their results into the arrays they were given, unless those are read-only."""

    def get(self, source: str, name: str, defines: Mapping[str, int] | None = None) -> Kernel:
        return _CardKernel(super().get(source, name, defines))


class _CardKernel(Kernel):
    def __init__(self, kernel: Kernel) -> None:
        self.name, self._kernel = kernel.name, kernel

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        import cupy

        held: dict[int, tuple[np.ndarray[Any, Any], Any]] = {}
        for arg in args:
            if isinstance(arg, np.ndarray) and arg.ctypes.data not in held:
                held[arg.ctypes.data] = arg, upload(arg)
        placed = tuple(held[arg.ctypes.data][1] if isinstance(arg, np.ndarray) else arg for arg in args)
        self._kernel(grid, block, placed, shared_mem=shared_mem, stream=cupy.cuda.get_current_stream())
        for host, array in held.values():
            if host.flags.writeable:
                host[...] = array.get().view(host.dtype).reshape(host.shape)


def upload(array: np.ndarray[Any, Any]) -> Any:
    """A copy of a C-contiguous array on the GPU."""
    import cupy

    target = cupy.empty((max(array.nbytes, 1),), np.uint8)
    if array.nbytes:
        target.set(np.frombuffer(array.tobytes(), np.uint8))
    return target
