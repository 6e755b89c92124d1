"""A double of CuPy that needs no GPU: arrays in the executor's memory, kernels through the executor, lazy streams.

    with fake_cupy.installed(Settings(progress="lazy")) as gpu:
        ...              # `import cupy` now gives the double
        gpu.launches     # what ran

It has the part of CuPy's surface that the engine may use (docs/design.md) and no mathematics but cuBLAS: anything else
raises AttributeError or NotImplementedError.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cupy_backends.cuda.libs
from cupy_backends.cuda.libs import nvrtc

from tests.gpu_without_gpu import executor
from tests.gpu_without_gpu.fake_cupy import arrays, cublas, device, kernels, streams
from tests.gpu_without_gpu.fake_cupy.device import Gpu, Settings

__all__ = ["Gpu", "Settings", "installed"]


class _Module(ModuleType):
    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        self.__dict__.update(members)
        self.__path__: list[str] = []  # a package, so that `import cupy.cuda.runtime` looks in sys.modules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the CuPy double has no {self.__name__}.{name}")


class Device:
    """As `cupy.cuda.Device`, of which there is one."""

    def __init__(self, device: int | None = None) -> None:
        self.id = device or 0

    @property
    def compute_capability(self) -> str:
        return device.gpu().settings.compute_capability

    @property
    def mem_info(self) -> tuple[int, int]:
        return _mem_get_info()

    @property
    def attributes(self) -> dict[str, int]:
        properties = _properties(0)
        return {
            "MultiProcessorCount": properties["multiProcessorCount"],
            "MaxSharedMemoryPerBlockOptin": properties["sharedMemPerBlockOptin"],
        }

    def synchronize(self) -> None:
        streams.device_synchronize()

    def use(self) -> Device:
        return self

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def _mem_get_info() -> tuple[int, int]:
    gpu = device.gpu()
    return gpu.settings.memory - gpu.used, gpu.settings.memory


def _properties(_: int) -> dict[str, Any]:
    settings = device.gpu().settings
    limits = executor.SHARED_LIMITS
    return {
        "name": b"CuPy double",
        "totalGlobalMem": settings.memory,
        "multiProcessorCount": settings.multiprocessors,
        "major": int(settings.compute_capability[:-1]),
        "minor": int(settings.compute_capability[-1]),
        "sharedMemPerBlock": 48 << 10,
        "sharedMemPerBlockOptin": limits[int(settings.compute_capability)] << 10,
        "l2CacheSize": 32 << 20,
    }


class _NoPool:
    """The double gives memory back when an array goes."""

    def free_all_blocks(self) -> None:
        """There are none."""


def _modules() -> dict[str, ModuleType]:
    runtime = _Module(
        "cupy.cuda.runtime",
        CUDARuntimeError=device.CUDARuntimeError,
        driverGetVersion=lambda: device.gpu().settings.driver_version,
        runtimeGetVersion=lambda: 13000,
        getDeviceCount=lambda: device.gpu().settings.device_count,
        getDeviceProperties=_properties,
        getDevice=lambda: 0,
        setDevice=lambda _: None,
        memGetInfo=_mem_get_info,
        deviceSynchronize=streams.device_synchronize,
        memcpyDeviceToDevice=3,
        memsetAsync=lambda ptr, value, size, stream: arrays.memset_async(ptr, value, size, streams.stream_of(stream)),
    )
    driver = _Module("cupy.cuda.driver", CUDADriverError=device.CUDADriverError)
    memory = _Module("cupy.cuda.memory", OutOfMemoryError=device.OutOfMemoryError, MemoryPointer=arrays.MemoryPointer)
    stream = _Module("cupy.cuda.stream", Stream=streams.Stream, get_current_stream=streams.current_stream)
    device_module = _Module("cupy.cuda.device", Device=Device, get_cublas_handle=cublas.get_cublas_handle)
    cuda = _Module(
        "cupy.cuda",
        runtime=runtime, driver=driver, memory=memory, stream=stream, device=device_module,
        Device=Device, Stream=streams.Stream, Event=streams.Event, Graph=streams.Graph,
        MemoryPointer=arrays.MemoryPointer, alloc=arrays.allocate,
        alloc_pinned_memory=arrays.alloc_pinned_memory,
        get_current_stream=streams.current_stream, get_elapsed_time=streams.elapsed_ms,
        is_available=lambda: True,
    )  # fmt: skip
    cupy = _Module(
        "cupy",
        cuda=cuda, ndarray=arrays.ndarray, empty=arrays.empty, zeros=arrays.zeros, asarray=arrays.asarray,
        asnumpy=arrays.asnumpy, RawModule=kernels.RawModule, __version__="14.2.0",
        get_default_memory_pool=_NoPool, get_default_pinned_memory_pool=_NoPool,
    )  # fmt: skip
    return {m.__name__: m for m in (cupy, cuda, runtime, driver, memory, stream, device_module)}


@contextmanager
def installed(settings: Settings | None = None) -> Iterator[Gpu]:
    """`import cupy` and `cupy_backends.cuda.libs.cublas` give the double; NVRTC stays the real one."""
    nvrtc.getVersion()  # its first call imports parts of the real CuPy
    gpu = Gpu(settings or Settings())
    before = device.replace_gpu(gpu)
    streams.reset(gpu.settings.seed)
    libs, name = cupy_backends.cuda.libs, "cupy_backends.cuda.libs.cublas"
    real = {n: module for n, module in sys.modules.items() if _is_doubled(n)}
    real_attribute = vars(libs).get("cublas")
    _forget_doubled()
    sys.modules.update(_modules())
    if gpu.settings.cublas:
        sys.modules[name] = vars(libs)["cublas"] = _Module(name, gemmEx=cublas.gemmEx)
    try:
        yield gpu
    finally:
        _forget_doubled()
        sys.modules.update(real)
        vars(libs).pop("cublas", None)
        if real_attribute is not None:
            vars(libs)["cublas"] = real_attribute
        device.replace_gpu(before)


def _is_doubled(name: str) -> bool:
    return name in ("cupy", "cupy_backends.cuda.libs.cublas") or name.startswith("cupy.")


def _forget_doubled() -> None:
    for name in [name for name in sys.modules if _is_doubled(name)]:
        del sys.modules[name]
