"""Device arrays, their memory, and pinned host memory: allocation, copies, memset and views; no arithmetic.

A copy from pinned memory reads it when the copy runs, one from other host memory when it is queued, as CUDA does. A
copy to the host leaves poison there until it runs.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gpu_without_gpu.fake_cupy.device import CUDARuntimeError, Memory
from tests.gpu_without_gpu.fake_cupy.streams import Stream, current_stream
from tests.gpu_without_gpu.machine import POISON

_LIVE: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()  # by address


def allocate(nbytes: int) -> MemoryPointer:
    """As `cupy.cuda.alloc`. Raises OutOfMemoryError."""
    memory = Memory(nbytes)
    _LIVE[memory.ptr] = memory
    return MemoryPointer(memory, 0)


def device_bytes(pointer: int, nbytes: int) -> NDArray[np.uint8]:
    """The bytes at a device address, as the host must not see them. Raises CUDARuntimeError where there are none."""
    for base, memory in list(_LIVE.items()):
        if base <= pointer and pointer + nbytes <= base + memory.size:
            return memory.allocation.bytes[pointer - base : pointer - base + nbytes]
    raise CUDARuntimeError("cudaErrorInvalidValue")


class MemoryPointer:
    """As `cupy.cuda.MemoryPointer`."""

    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, 0

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def memset_async(self, value: int, size: int, stream: Stream | None = None) -> None:
        memset_async(self.ptr, value, size, stream or current_stream())

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Stream | None = None) -> None:
        copy_device_async(self.ptr, src.ptr, size, stream or current_stream())

    def copy_from_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        copy_to_device_async(self.ptr, _host_bytes(mem, size), stream or current_stream())

    def copy_to_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        copy_to_host_async(_host_bytes(mem, size), self.ptr, stream or current_stream())


def memset_async(pointer: int, value: int, size: int, stream: Stream) -> None:
    def work() -> None:
        device_bytes(pointer, size)[...] = value & 0xFF

    device_bytes(pointer, size)
    stream.push(work)


def copy_device_async(to: int, source: int, size: int, stream: Stream) -> None:
    def work() -> None:
        device_bytes(to, size)[...] = device_bytes(source, size)

    device_bytes(to, size), device_bytes(source, size)
    stream.push(work)


def copy_to_device_async(to: int, host: NDArray[np.uint8], stream: Stream) -> None:
    if not is_pinned(host):
        if stream.capture is not None:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")
        host = host.copy()

    def work() -> None:
        device_bytes(to, host.nbytes)[...] = host

    device_bytes(to, host.nbytes)
    stream.push(work)


def copy_to_host_async(host: NDArray[np.uint8], source: int, stream: Stream) -> None:
    def work() -> None:
        host[...] = device_bytes(source, host.nbytes)

    device_bytes(source, host.nbytes)
    if stream.capture is None:
        host[...] = POISON
    stream.push(work)
    if not is_pinned(host):
        stream.synchronize()  # a copy to pageable memory returns when it is done


class ndarray:
    """As `cupy.ndarray`, less everything that would compile or launch a kernel."""

    def __init__(self, view: NDArray[Any], memory: Memory) -> None:
        self._view, self._memory = view, memory

    shape = property(lambda self: self._view.shape)
    dtype = property(lambda self: self._view.dtype)
    strides = property(lambda self: self._view.strides)
    size = property(lambda self: self._view.size)
    nbytes = property(lambda self: self._view.nbytes)
    ndim = property(lambda self: self._view.ndim)
    itemsize = property(lambda self: self._view.itemsize)
    flags = property(lambda self: self._view.flags)

    @property
    def data(self) -> MemoryPointer:
        return MemoryPointer(self._memory, self._view.ctypes.data - self._memory.ptr)

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, index: Any) -> ndarray:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, int | np.integer | slice) or part is Ellipsis for part in parts):
            raise NotImplementedError("the CuPy double has no indexing by arrays: it is a kernel")
        view = self._view[(*parts, Ellipsis)] if Ellipsis not in parts else self._view[index]
        return ndarray(view, self._memory)

    def reshape(self, *shape: Any) -> ndarray:
        view = self._view.reshape(*shape)
        if not np.may_share_memory(view, self._view):
            raise NotImplementedError("the CuPy double does not copy in reshape: it is a kernel")
        return ndarray(view, self._memory)

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def view(self, dtype: Any) -> ndarray:
        return ndarray(self._view.view(dtype), self._memory)

    def set(self, arr: NDArray[Any], stream: Stream | None = None) -> None:
        if arr.dtype != self.dtype or arr.shape != self.shape:
            raise ValueError(f"cannot set {self.dtype}{self.shape} from {arr.dtype}{arr.shape}")
        self._require_contiguous(arr)
        copy_to_device_async(self.data.ptr, _bytes_of(arr), stream or current_stream())

    def get(
        self, stream: Stream | None = None, order: str = "C", out: NDArray[Any] | None = None, blocking: bool = True
    ) -> NDArray[Any]:
        if out is None:
            out = np.empty(self.shape, self.dtype)
        if out.dtype != self.dtype or out.shape != self.shape:
            raise ValueError(f"cannot get {self.dtype}{self.shape} into {out.dtype}{out.shape}")
        self._require_contiguous(out)
        target = stream or current_stream()
        copy_to_host_async(_bytes_of(out), self.data.ptr, target)
        if blocking:
            target.synchronize()
        return out

    def _require_contiguous(self, host: NDArray[Any]) -> None:
        if not (self._view.flags.c_contiguous and host.flags.c_contiguous):
            raise NotImplementedError("the CuPy double copies contiguous arrays only")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the CuPy double has no ndarray.{name}: it holds no kernels of CuPy's own")


def empty(shape: int | tuple[int, ...], dtype: Any = float) -> ndarray:
    dims = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    dt = np.dtype(dtype)
    if dt.name.startswith("float8"):
        raise TypeError(f"CuPy has no dtype {dt.name}: store it as uint8")
    nbytes = math.prod(dims) * dt.itemsize
    memory = allocate(nbytes).mem
    return ndarray(memory.allocation.bytes[:nbytes].view(dt).reshape(dims), memory)


def zeros(shape: int | tuple[int, ...], dtype: Any = float) -> ndarray:
    array = empty(shape, dtype)
    array.data.memset_async(0, array.nbytes)
    return array


def asarray(a: NDArray[Any], dtype: Any = None) -> ndarray:
    host = np.ascontiguousarray(a, dtype)
    array = empty(host.shape, host.dtype)
    array.set(host)
    return array


def asnumpy(
    a: ndarray, stream: Stream | None = None, order: str = "C", out: Any = None, *, blocking: bool = True
) -> Any:
    return a.get(stream, order, out, blocking)


# ---- host memory

_PINNED: dict[int, int] = {}  # address -> bytes


def alloc_pinned_memory(size: int) -> Any:
    """As `cupy.cuda.alloc_pinned_memory`: poisoned bytes with the buffer protocol and `ptr`."""
    kind = type("PinnedMemoryPointer", (ctypes.Array,), {"_type_": ctypes.c_ubyte, "_length_": max(size, 1)})
    memory = kind()
    memory.ptr = ctypes.addressof(memory)
    ctypes.memset(memory.ptr, POISON, max(size, 1))
    _PINNED[memory.ptr] = max(size, 1)
    weakref.finalize(memory, _PINNED.pop, memory.ptr, None)
    return memory


def is_pinned(host: NDArray[Any]) -> bool:
    first, last = host.ctypes.data, host.ctypes.data + host.nbytes
    return any(base <= first and last <= base + size for base, size in _PINNED.items())


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _host_bytes(pointer: Any, size: int) -> NDArray[np.uint8]:
    address = int((pointer.value or 0) if isinstance(pointer, ctypes.c_void_p) else pointer)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
