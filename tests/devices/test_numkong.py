"""What the device relies on in NumKong: products are right, and no row or column depends on its company."""

import numpy as np
import pytest

from engine.devices.cpu import numkong
from engine.devices.cpu.layout import aligned_bytes
from engine.devices.cpu.numkong import configure_thread, packed_product
from engine.errors import ConfigError

ROWS, K = 37, 72


def multiply(dtype: str, a: np.ndarray, w: np.ndarray) -> np.ndarray:
    import ctypes

    product = packed_product(dtype)
    packed = aligned_bytes(product.packed_nbytes(*w.shape))
    product.pack(w, packed.ctypes.data)
    c = np.full((len(a), len(w)), np.nan, product.c_dtype)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_size_t] * 5)(product.dots_address)
    configure_thread()
    call(a.ctypes.data, packed.ctypes.data, c.ctypes.data, len(a), len(w), w.shape[1], a.strides[0], c.strides[0])
    return c


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_do_not_depend_on_neighbouring_rows_or_columns(dtype: str) -> None:
    rng = np.random.default_rng(0)
    kind = packed_product(dtype).dtype
    a, w = rng.standard_normal((ROWS, K)).astype(kind), rng.standard_normal((200, K)).astype(kind)
    whole = multiply(dtype, a, w)
    exact = a.astype(np.float64) @ w.astype(np.float64).T
    assert np.abs(whole - exact).max() < (1e-4 if dtype == "bfloat16" else 1e-12)
    for rows in (1, 2, 5, 16):
        np.testing.assert_array_equal(multiply(dtype, a[:rows], w), whole[:rows])
    for first, last in ((0, 16), (16, 200), (32, 80), (192, 200)):
        np.testing.assert_array_equal(multiply(dtype, a, w[first:last]), whole[:, first:last])


def test_a_build_without_c_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numkong, "_library", object)
    with pytest.raises(ConfigError, match="does not export its C functions"):
        packed_product("bfloat16")
