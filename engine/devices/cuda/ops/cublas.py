"""Matrix products by cuBLAS, where it is installed: for many rows, when results need not be batch invariant.

Nothing needs it: what it does not take, `engine/devices/cuda/ops/gemm.py` does. A product of cuBLAS cannot be
captured in a graph.
"""

from typing import Any

import numpy as np

from engine.devices.cuda.ops.gemm import Epilogue, Weight

FROM_ROWS = 256
"""Rows from which a product is bound by arithmetic on large GPUs, by operations per byte; not measured yet."""

_NORMAL, _TRANSPOSED = 0, 1
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_BETA = {Epilogue.STORE: 0.0, Epilogue.STORE_F32: 0.0, Epilogue.ADD_F32: 1.0}


def missing() -> str | None:
    """Why cuBLAS cannot be used; None if it can."""
    try:
        from cupy_backends.cuda.libs import cublas  # noqa: F401
    except (ImportError, OSError) as error:
        return str(error).splitlines()[0]
    return None


def takes(weight: Weight, rows: int, epilogue: Epilogue) -> bool:
    """Whether `linear` is for this product: enough rows, and nothing fused that cuBLAS does not know."""
    return rows >= FROM_ROWS and epilogue in _BETA and weight.scales is None and weight.bias is None


def linear(x: Any, weight: Weight, out: Any, rows: int, epilogue: Epilogue, *, stream: Any) -> None:
    """out = epilogue(x . W.T), for what `takes` accepts; arguments as of `gemm.linear`.

    cuBLAS is column-major: it computes out.T [N, rows] = (W.T).T . x.T.
    """
    from cupy.cuda.device import get_cublas_handle
    from cupy_backends.cuda.libs import cublas

    n, k = weight.values.shape
    scalars = np.array([1.0, _BETA[epilogue]], np.float32)
    alpha, beta = scalars.ctypes.data, scalars[1:].ctypes.data
    element = _DTYPES[x.dtype.name]
    a, b = (weight.values.data.ptr, element, k), (x.data.ptr, element, k)
    c = (out.data.ptr, _DTYPES[out.dtype.name], n)
    with stream:  # CuPy's wrapper launches on its current stream
        handle = get_cublas_handle()
        algorithm = (_COMPUTE_32F, _DEFAULT_ALGORITHM)
        cublas.gemmEx(handle, _TRANSPOSED, _NORMAL, n, rows, k, alpha, *a, *b, beta, *c, *algorithm)
