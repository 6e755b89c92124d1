"""Matrix products by cuBLAS, where it is installed: for many rows, when results need not be batch invariant.

Nothing needs it: what it does not take, `engine/devices/cuda/ops/gemm.py` does. A product of cuBLAS cannot be
captured in a graph.
"""

from typing import Any

import numpy as np

from engine.devices.cuda.ops.gemm import Epilogue, Weight

FROM_ROWS, FROM_WORK = 256, 1 << 32
"""Rows, and multiplications, from which a product is cuBLAS's.

Fewer rows are mostly steps of decoding, which are recorded (`engine/devices/cuda/graphs.py`). Fewer multiplications
are over before the host has launched the next: an H200 takes a third of `gemm.py`'s time for a product, but its
host twice the time for a launch. A prompt of 512 tokens takes 15 ms instead of 31 with Llama-3-8B's shapes, and
would take 15 ms instead of 9 with SmolLM2-135M's.
"""

_NORMAL, _TRANSPOSED = 0, 1
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_SCALARS = {
    epilogue: np.array([1.0, beta], np.float32)
    for epilogue, beta in ((Epilogue.STORE, 0.0), (Epilogue.STORE_F32, 0.0), (Epilogue.ADD_F32, 1.0))
}
"""alpha and beta."""


def missing() -> str | None:
    """Why cuBLAS cannot be used; None if it can."""
    try:
        from cupy_backends.cuda.libs import cublas  # noqa: F401
    except (ImportError, OSError) as error:
        return str(error).splitlines()[0]
    return None


def takes(weight: Weight, rows: int, epilogue: Epilogue) -> bool:
    """Whether `linear` is for this product: enough of it, and nothing fused that cuBLAS does not know."""
    if rows < FROM_ROWS or epilogue not in _SCALARS or weight.scales is not None or weight.bias is not None:
        return False
    n, k = weight.values.shape
    return bool(rows * n * k >= FROM_WORK)


def linear(x: Any, weight: Weight, out: Any, rows: int, epilogue: Epilogue, *, stream: Any) -> None:
    """out = epilogue(x . W.T), for what `takes` accepts; arguments as of `gemm.linear`.

    cuBLAS is column-major: it computes out.T [N, rows] = (W.T).T . x.T.
    """
    from cupy.cuda.device import get_cublas_handle
    from cupy_backends.cuda.libs import cublas

    n, k = weight.values.shape
    alpha = _SCALARS[epilogue].ctypes.data
    beta = alpha + 4
    element = _DTYPES[x.dtype.name]
    a, b = (weight.values.data.ptr, element, k), (x.data.ptr, element, k)
    c = (out.data.ptr, _DTYPES[out.dtype.name], n)
    with stream:  # CuPy's wrapper launches on its current stream
        handle = get_cublas_handle()
        algorithm = (_COMPUTE_32F, _DEFAULT_ALGORITHM)
        cublas.gemmEx(handle, _TRANSPOSED, _NORMAL, n, rows, k, alpha, *a, *b, beta, *c, *algorithm)
