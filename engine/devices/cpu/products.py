"""Products: how a weight is packed for a compute dtype, and which code multiplies with it.

    float32     NumKong, sums in float64
    bfloat16    our own kernel where the processor has AVX512-BF16, else NumKong
    int8        our own kernel, on AVX512-VNNI: activations in groups of 48, weights of 192

Read next: `engine/devices/cpu/kernels/matmul.py`, `engine/devices/cpu/numkong.py`.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.devices.cpu import numkong
from engine.devices.cpu.kernels.constants import GROUP, LANES, PART_BLOCKS, SPAN
from engine.devices.cpu.layout import padded
from engine.errors import ConfigError


class Product(Protocol):
    """c[m, n] = a[m, k] . w[n, k].

    Attributes:
        dtype: of `a` and `w`.
        unit: panels are multiples of so many columns.
        dots_address: NumKong's function, which multiplies whole panels, or 0 for our own kernel, which may do units.
    """

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def unit(self) -> int: ...

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
    unit: int = PART_BLOCKS * LANES
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


@dataclass(frozen=True, slots=True)
class Int8Groups:
    """Weights as [n / 16, k / 48, 12, 16, 4] uint8, then their scales [n / 16, k / 192, 16] float16."""

    dtype: np.dtype[Any]
    unit: int = PART_BLOCKS * LANES
    dots_address: int = 0

    def packed_nbytes(self, n: int, k: int) -> int:
        return padded(n) * (-(-k // GROUP) * GROUP + -(-k // (SPAN * GROUP)) * 2)

    def pack(self, weight: NDArray[Any], address: int) -> None:
        from engine.devices.cpu.kernels.matmul_int8 import pack_int8

        n, k = weight.shape
        blocks, groups = padded(n) // LANES, -(-k // GROUP)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * self.packed_nbytes(n, k)).from_address(address))
        split = blocks * groups * GROUP * LANES
        wide = np.zeros((blocks * LANES, groups * GROUP), np.float32)
        wide[:n, :k] = weight
        spans = np.arange(0, groups * GROUP, SPAN * GROUP)
        largest = np.maximum.reduceat(np.abs(wide).reshape(blocks, LANES, -1), spans, axis=2)
        scales = (largest / np.float32(127)).astype(np.float16).transpose(0, 2, 1)
        memory[split:].view(np.float16).reshape(scales.shape)[:] = scales
        packed = memory[:split].reshape(blocks, groups, GROUP // 4, LANES, 4)
        pack_int8(wide, packed, np.ascontiguousarray(scales, np.float32))


def packed_product(dtype: str, weights_int8: bool = False) -> Product:
    """The product for a compute dtype, and for weights rounded to int8.

    Raises ConfigError when NumKong is missing or exports no C functions, or the processor lacks what int8 needs.
    """
    if weights_int8:
        if not numkong.has_int8_dot():
            raise ConfigError("quantization: int8 needs a processor with AVX512-VNNI, or --device cuda")
        return Int8Groups(np.dtype(ml_dtypes.bfloat16))
    if dtype == "bfloat16" and numkong.has_bfloat16_dot():
        return BfloatPairs(np.dtype(ml_dtypes.bfloat16))
    return numkong.packed_product(dtype)
