"""A pytest plugin: the kernels' own tests run on this machine's GPU instead of on the executor.

    python -m pytest -p perf.gpu.on_card tests/cuda/test_{attention,gemm,inputs,kv,layers,sampling}.py

Values are asked as ever. What only the executor knows (bytes read, bank conflicts) is skipped, and so is what a test
compiles by itself.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import pytest

from engine.devices.cuda.device import gpu_arch
from engine.devices.cuda.registry import Kernel
from perf.gpu.card import CardRegistry
from tests.cuda import kernels
from tests.gpu_without_gpu import executor


class _OnCard(CardRegistry):
    """In place of a CpuRegistry, whatever architecture it is for."""

    def __init__(self, arch: str = "") -> None:
        super().__init__(gpu_arch())
        self.schedule: Any = None
        self.profile = False
        self.reports: list[tuple[str, _NoReport]] = []

    def get(self, source: str, name: str, defines: Mapping[str, int] | None = None) -> Kernel:
        return _Noted(super().get(source, name, defines), self.reports)


class _Noted(Kernel):
    """Tells the registry of its launches."""

    def __init__(self, kernel: Kernel, reports: "list[tuple[str, _NoReport]]") -> None:
        self.name, self._kernel, self._reports = kernel.name, kernel, reports

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0, stream: Any
    ) -> None:
        self._kernel(grid, block, args, shared_mem=shared_mem, stream=stream)
        self._reports.append((self.name, _NoReport()))


class _NoReport:
    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip("only the executor counts")


def _compile(*args: Any, **values: Any) -> NoReturn:
    pytest.skip("compiled for the executor")


kernels.CpuRegistry = _OnCard  # type: ignore[misc, assignment]
executor.compile = _compile
