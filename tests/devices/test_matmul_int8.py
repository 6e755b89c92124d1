"""The int8 product against NumPy in float64: what is rounded, what is summed, and that company changes nothing."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from engine.devices.cpu import numkong
from engine.devices.cpu.kernels.constants import GROUP
from engine.devices.cpu.kernels.matmul_int8 import HAS_INT8_DOT, int8_panel
from engine.devices.cpu.kernels.quantize import quantize_row
from engine.devices.cpu.layout import aligned_bytes, int8_row_nbytes, padded
from engine.devices.cpu.products import Int8Groups, packed_product
from engine.errors import ConfigError

needs_vnni = pytest.mark.skipif(not HAS_INT8_DOT, reason="the processor has no AVX512-VNNI, int8 is refused there")

PRODUCT = Int8Groups(np.dtype(ml_dtypes.bfloat16))
run_panel, run_quantize = njit(int8_panel.py_func), njit(quantize_row.py_func)


def rounded(values: NDArray[Any], group: int, scale_dtype: Any) -> NDArray[np.float64]:
    """Each group rounded to 255 steps of absmax / 127."""
    n, k = values.shape
    wide = np.zeros((n, -(-k // group) * group), np.float32)
    wide[:, :k] = values
    groups = wide.reshape(n, -1, group)
    scales = (np.abs(groups).max(2, keepdims=True) / np.float32(127)).astype(scale_dtype).astype(np.float32)
    steps = np.divide(groups, scales, out=np.zeros_like(groups), where=scales > 0)
    return (np.clip(np.rint(steps), -127, 127).astype(np.float64) * scales).reshape(n, -1)[:, :k]


def quantize(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    m, k = x.shape
    wide = np.zeros((m, padded(k)), np.float32)
    wide[:, :k] = x
    rows = aligned_bytes(m * padded(int8_row_nbytes(k) // 4) * 4).reshape(m, -1)
    rows[:] = 255
    for i in range(m):
        run_quantize(wide[i].ctypes.data, k, rows[i].ctypes.data)
    return rows


def multiply(x: NDArray[np.float32], weight: NDArray[Any], onto: float | None = None) -> NDArray[np.float32]:
    (n, k), rows = weight.shape, quantize(x)
    packed = aligned_bytes(PRODUCT.packed_nbytes(n, k))
    PRODUCT.pack(weight, packed.ctypes.data)
    out = np.full((len(x), padded(n)), np.nan if onto is None else onto, np.float32)
    groups = -(-k // GROUP)
    scales = packed.ctypes.data + padded(n) * groups * GROUP
    places = (rows.ctypes.data, rows.strides[0], packed.ctypes.data, scales, groups)
    run_panel(*places, out.ctypes.data, out.strides[0], len(x), padded(n) // 16, 0, int(onto is not None))
    return out[:, :n]


@needs_vnni
@pytest.mark.parametrize(("n", "k"), [(16, 32), (5, 7), (50, 72), (130, 576), (48, 40)])
def test_right_for_every_tail_and_the_same_in_any_company(n: int, k: int) -> None:
    rng = np.random.default_rng(n * k)
    x = (rng.standard_normal((13, k)) * rng.uniform(0.01, 30, (13, 1))).astype(np.float32)
    weight = rng.standard_normal((n, k)).astype(ml_dtypes.bfloat16)
    whole = multiply(x, weight)
    exact = rounded(x, GROUP, np.float32) @ rounded(weight.astype(np.float32), 192, np.float16).T
    np.testing.assert_allclose(whole, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    for rows in range(1, 13):
        np.testing.assert_array_equal(multiply(x[:rows], weight), whole[:rows])
    np.testing.assert_array_equal(multiply(x, weight[: n // 2 + 1]), whole[:, : n // 2 + 1])
    np.testing.assert_array_equal(multiply(x, weight, onto=2.0), whole + np.float32(2))


@needs_vnni
def test_zero_groups_stay_zero_and_extremes_finite() -> None:
    x = np.zeros((4, 64), np.float32)
    x[1, 3], x[2, :32], x[3] = 1e-30, 1e30, -1e-3
    weight = np.ones((16, 64), ml_dtypes.bfloat16)
    out = multiply(x, weight)
    assert np.isfinite(out).all() and not out[0].any()
    np.testing.assert_allclose(out[:, 0], [0, 1e-30, 32e30, -0.064], rtol=1e-2)


@needs_vnni
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_not_lost(bad: float) -> None:
    """A fault must reach the logits, where it is seen (S21); rows beside it are not touched."""
    x = np.ones((3, 64), np.float32)
    x[1, 40] = bad
    out = multiply(x, np.ones((16, 64), ml_dtypes.bfloat16))
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


def test_a_processor_without_the_instruction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numkong, "has_int8_dot", lambda: False)
    with pytest.raises(ConfigError, match="quantization: int8 needs a processor with AVX512-VNNI"):
        packed_product("bfloat16", weights_int8=True)
