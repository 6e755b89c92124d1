"""How busy the GPUs are, by NVIDIA's management library, where pynvml is installed."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any


def open_gpus() -> dict[int, Callable[[], float]]:
    """A reading of each GPU's utilization in [0, 1]; none where pynvml or a driver is missing."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # pynvml's own errors have no base that could be named without it
        return {}
    return {i: partial(_utilization, nvml, handle) for i, handle in enumerate(handles)}


def _utilization(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
