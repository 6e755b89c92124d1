"""Kernels on the CPU: a registry whose kernels run in tests/gpu_without_gpu on NumPy arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.devices.cuda.registry import SOURCES, Kernel, KernelRegistry, Variant
from tests.gpu_without_gpu import executor
from tests.gpu_without_gpu.executor import SCHEDULES, LaunchReport, Schedule


class CpuRegistry(KernelRegistry):
    """Launches run at once; their reports are kept.

    Attributes:
        schedule, profile: of the launches to come.
        reports: kernel name and report of every launch.
    """

    def __init__(self, arch: str = "compute_80") -> None:
        super().__init__(arch, folders=())
        self.schedule = SCHEDULES[0]
        self.profile = False
        self.reports: list[tuple[str, LaunchReport]] = []

    def get(self, source: str, name: str, defines: Mapping[str, int] | None = None) -> Kernel:
        options = (*Variant.of(source, defines or {}).options, f"-I{SOURCES}")
        module = executor.compile((SOURCES / source).read_text(), options, self.arch, name=source)
        return _CpuKernel(self, name, module)


class _CpuKernel(Kernel):
    def __init__(self, registry: CpuRegistry, name: str, module: executor.Module) -> None:
        self.name = name
        self._registry, self._kernel = registry, module.kernel(name)

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        stream: Any,
    ) -> None:
        registry = self._registry
        schedule, profile = registry.schedule, registry.profile
        report = self._kernel.launch(grid, block, args, smem=shared_mem, schedule=schedule, profile=profile)
        registry.reports.append((self.name, report))


def element_dtype(name: str) -> np.dtype[Any]:
    """ "bfloat16" or "float16" as a NumPy dtype."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else np.float16)


__all__ = ["SCHEDULES", "CpuRegistry", "Schedule", "element_dtype"]
