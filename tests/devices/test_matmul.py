"""Our bfloat16 product against float64, for every tail of rows, columns and inputs, and free of company."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from engine.devices.cpu.kernels.matmul import bfloat16_panel
from engine.devices.cpu.kernels.simd import HAS_BFLOAT16_DOT
from engine.devices.cpu.layout import aligned_bytes, padded
from engine.devices.cpu.products import BfloatPairs, packed_product

pytestmark = pytest.mark.skipif(not HAS_BFLOAT16_DOT, reason="the processor has no AVX512-BF16; NumKong multiplies")

PRODUCT = BfloatPairs(np.dtype(ml_dtypes.bfloat16))
run = njit(bfloat16_panel.py_func)


def multiply(
    x: NDArray[Any], weight: NDArray[Any], bias: NDArray[np.float32] | None = None, onto: NDArray[Any] | None = None
) -> NDArray[np.float32]:
    """x . weight.T + bias (+ onto); x is given padded to whole vectors, as the device keeps it."""
    rows, (n, k) = len(x), weight.shape
    packed = aligned_bytes(PRODUCT.packed_nbytes(n, k))
    packed[:] = 255
    PRODUCT.pack(weight, packed.ctypes.data)
    wide = np.zeros((rows, padded(k)), PRODUCT.dtype)
    wide[:, :k] = x
    out = np.full((rows, padded(n)), np.nan, np.float32)
    if onto is not None:
        out[:, :n], out[:, n:] = onto, 0
    terms = np.zeros(padded(n), np.float32)
    if bias is not None:
        terms[:n] = bias
    pairs = (k + 1) // 2
    where = terms.ctypes.data if bias is not None else 0
    sizes = (rows, padded(n) // 16, pairs, where, int(onto is not None))
    run(wide.ctypes.data, wide.strides[0], packed.ctypes.data, pairs * 64, out.ctypes.data, out.strides[0], *sizes)
    assert not out[:, n:].any(), "pad lanes stay zero"
    return out[:, :n]


@pytest.mark.parametrize(("n", "k"), [(16, 2), (5, 7), (48, 576), (130, 72), (200, 33)])
def test_right_for_every_tail_and_the_same_in_any_company(n: int, k: int) -> None:
    rng = np.random.default_rng(n * k)
    x = rng.standard_normal((21, k)).astype(PRODUCT.dtype)
    weight = rng.standard_normal((n, k)).astype(PRODUCT.dtype)
    whole = multiply(x, weight)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(whole, exact, atol=1e-5 * np.sqrt(k) * 4)
    for rows in range(1, 21):
        np.testing.assert_array_equal(multiply(x[:rows], weight), whole[:rows])
    np.testing.assert_array_equal(multiply(x, weight[: n // 2 + 1]), whole[:, : n // 2 + 1])


def test_bias_and_residual_are_added_once() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((13, 40)).astype(PRODUCT.dtype)
    weight = rng.standard_normal((50, 40)).astype(PRODUCT.dtype)
    bias = rng.standard_normal(50).astype(np.float32)
    onto = rng.standard_normal((13, 50)).astype(np.float32)
    plain = multiply(x, weight)
    np.testing.assert_array_equal(multiply(x, weight, bias), plain + bias)
    np.testing.assert_array_equal(multiply(x, weight, bias, onto), (plain + bias) + onto)


def test_the_device_uses_it() -> None:
    assert packed_product("bfloat16").dots_address == 0
    assert packed_product("float32").dots_address != 0
