"""gemmEx, the one piece of mathematics in the double: 2-D products with float32 sums, column-major as cuBLAS has it."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.gpu_without_gpu.fake_cupy.arrays import device_bytes
from tests.gpu_without_gpu.fake_cupy.device import gpu
from tests.gpu_without_gpu.fake_cupy.streams import current_stream

CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_COMPUTE_32F = 68
_DTYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}


def get_cublas_handle() -> int:
    return 1


def gemmEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int,
    a: int, a_type: int, lda: int, b: int, b_type: int, ldb: int, beta: int,
    c: int, c_type: int, ldc: int, compute_type: int, algorithm: int,
) -> None:  # fmt: skip
    """Queue c = alpha * op(a) op(b) + beta * c on the current stream. alpha and beta are addresses of host float32.

    Raises NotImplementedError under capture, as CuPy does.
    """
    stream = current_stream()
    if stream.is_capturing():
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
    if compute_type != CUBLAS_COMPUTE_32F:
        raise ValueError("the double knows CUBLAS_COMPUTE_32F only")
    scale, keep = (ctypes.c_float.from_address(address).value for address in (alpha, beta))

    def work() -> None:
        gpu().gemms += 1
        left = _operand(a, a_type, lda, m, k, transa).astype(np.float32)
        right = _operand(b, b_type, ldb, k, n, transb).astype(np.float32)
        out = _matrix(c, c_type, ldc, m, n)
        product = scale * (left @ right)
        out[...] = (product + keep * out.astype(np.float32) if keep else product).astype(out.dtype)

    stream.push(work)


def _operand(pointer: int, type_code: int, stride: int, rows: int, columns: int, trans: int) -> NDArray[np.generic]:
    if trans == CUBLAS_OP_N:
        return _matrix(pointer, type_code, stride, rows, columns)
    return _matrix(pointer, type_code, stride, columns, rows).T


def _matrix(pointer: int, type_code: int, stride: int, rows: int, columns: int) -> NDArray[np.generic]:
    """A column-major matrix in device memory, as a view."""
    dtype = _DTYPES[type_code]
    if stride < rows:
        raise ValueError(f"leading dimension {stride} of a matrix of {rows} rows")
    elements = (columns - 1) * stride + rows
    flat = device_bytes(pointer, elements * dtype.itemsize).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, stride * dtype.itemsize))
