"""Products: how a weight is packed for a compute dtype, and which code multiplies with it.

    float32     NumKong, sums in float64
    bfloat16    our own kernel where the processor has AVX512-BF16, else NumKong

Read next: `engine/devices/cpu/kernels/matmul.py`, `engine/devices/cpu/numkong.py`.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.devices.cpu import numkong
from engine.devices.cpu.kernels.constants import LANES
from engine.devices.cpu.layout import padded


class Product(Protocol):
    """c[m, n] = a[m, k] . w[n, k].

    Attributes:
        dtype: of `a` and `w`.
        dots_address: NumKong's function, 0 for our own kernel.
    """

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def dots_address(self) -> int: ...

    def packed_nbytes(self, n: int, k: int) -> int:
        """Bytes of an [n, k] weight, packed."""

    def pack(self, weight: NDArray[Any], address: int) -> None:
        """Pack [n, k] rows, contiguous in k, at `address`. Releases the GIL."""


@dataclass(frozen=True, slots=True)
class BfloatPairs:
    """Weights as [n / 16, k / 2, 16, 2] bfloat16, zero where n or k is padded."""

    dtype: np.dtype[Any]
    dots_address: int = 0

    def packed_nbytes(self, n: int, k: int) -> int:
        return padded(n) * (k + k % 2) * self.dtype.itemsize

    def pack(self, weight: NDArray[Any], address: int) -> None:
        n, k = weight.shape
        if n % LANES or k % 2:
            weight = np.pad(weight.view(np.uint16), ((0, -n % LANES), (0, k % 2)))
        pairs = np.ascontiguousarray(weight).view(np.uint32).reshape(-1, LANES, (k + 1) // 2)
        packed = np.ctypeslib.as_array((ctypes.c_uint32 * pairs.size).from_address(address))
        np.copyto(packed.reshape(len(pairs), -1, LANES), pairs.transpose(0, 2, 1))


def packed_product(dtype: str) -> Product:
    """The product for a compute dtype. Raises ConfigError when NumKong is missing or exports no C functions."""
    if dtype == "bfloat16" and numkong.has_bfloat16_dot():
        return BfloatPairs(np.dtype(ml_dtypes.bfloat16))
    return numkong.packed_product(dtype)
