"""NumKong's packed matrix product by address: symbols of the wheel's extension module.

The Python functions of the wheel allocate and check at every call; the C functions beneath them are exported and
cost nothing to call. Rows of a product are bit-equal whatever the number of rows, and columns whatever the slice of
the weight they are packed in (checked by tests/devices/test_numkong.py).
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.devices.cpu.kernels.constants import LANES
from engine.errors import ConfigError

_ALL_CAPABILITIES = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """c[m, n] = a[m, k] . w[n, k] for one dtype of `a` and `w`.

    Attributes:
        dtype: of `a` and `w`.
        c_dtype: of `c`: float32 for bfloat16, float64 for float32.
        dots_address: `nk_dots_packed_*`.
    """

    dtype: np.dtype[Any]
    c_dtype: np.dtype[Any]
    dots_address: int
    _size: Any
    _pack: Any
    unit: int = LANES

    def packed_nbytes(self, n: int, k: int) -> int:
        return int(self._size(n, k))

    def pack(self, weight: NDArray[Any], address: int) -> None:
        """Pack [n, k] rows, contiguous in k, into `packed_nbytes(n, k)` bytes at `address`. Releases the GIL."""
        n, k = weight.shape
        self._pack(weight.ctypes.data, n, k, weight.strides[0], address)


def packed_product(dtype: str) -> PackedProduct:
    """The product for a compute dtype. Raises ConfigError when NumKong is missing or exports no C functions."""
    suffix = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    library = _library()
    try:
        size = getattr(library, f"nk_dots_packed_size_{suffix}")
        pack = getattr(library, f"nk_dots_pack_{suffix}")
        dots = getattr(library, f"nk_dots_packed_{suffix}")
    except AttributeError as error:
        raise ConfigError(f"device cpu: this build of numkong does not export its C functions ({error})") from error
    size.argtypes, size.restype = [ctypes.c_size_t] * 2, ctypes.c_size_t
    pack.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    pack.restype = None
    address = ctypes.cast(dots, ctypes.c_void_p).value
    assert address is not None
    if dtype == "bfloat16":
        return PackedProduct(np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), address, size, pack)
    return PackedProduct(np.dtype(np.float32), np.dtype(np.float64), address, size, pack)


def has_bfloat16_dot() -> bool:
    """Whether the processor multiplies pairs of bfloat16 in vectors of 512 bits."""
    _library()
    from numkong import get_capabilities

    return bool(get_capabilities().get("genoa"))


def has_int8_dot() -> bool:
    """Whether the processor multiplies bytes in fours in vectors of 512 bits."""
    _library()
    from numkong import get_capabilities

    return bool(get_capabilities().get("icelake"))


def configure_thread() -> None:
    """Enable the instructions NumKong's kernels need (AMX tiles) in the calling thread; once per thread."""
    configure = _library().nk_configure_thread
    configure.argtypes, configure.restype = [ctypes.c_uint64], None
    configure(_ALL_CAPABILITIES)


def _library() -> ctypes.CDLL:
    try:
        from numkong import _numkong  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        raise ConfigError("device cpu needs numkong: install the extra, e.g. pip install 'engine-llm[cpu]'") from error
    return ctypes.CDLL(_numkong.__file__)
