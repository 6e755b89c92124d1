"""The vector primitives against NumPy float64 and ml_dtypes."""

from typing import Any

import ml_dtypes
import numpy as np
from numba import njit

from engine.devices.cpu.kernels.bits import half_to_float
from engine.devices.cpu.kernels.simd import (
    exp,
    f32_pointer,
    keep_lanes,
    load,
    put,
    reduce_add,
    reduce_max,
    splat,
    store,
    u16_pointer,
)


@njit
def _exp(source: Any, target: Any, count: Any) -> None:
    for i in range(0, count, 16):
        store(f32_pointer(target), i, exp(load(f32_pointer(source), i)))


@njit
def _round(source: Any, vectors: Any, scalars: Any, count: Any) -> None:
    x = f32_pointer(source)
    for i in range(0, count, 16):
        store(u16_pointer(vectors), i, load(x, i))
    for i in range(count):
        put(u16_pointer(scalars), i, x[i])


@njit
def _reduce(source: Any, begin: Any, end: Any) -> Any:
    kept = keep_lanes(load(f32_pointer(source), 0), begin, end, splat(np.float32(0.0)))
    return reduce_add(kept), reduce_max(kept)


@njit
def _half(bits: Any) -> Any:
    return half_to_float(bits)


def test_exp() -> None:
    x = np.concatenate([np.linspace(-87, 88, 4080), [0.0] * 16]).astype(np.float32)
    y = np.empty_like(x)
    _exp(x.ctypes.data, y.ctypes.data, len(x))
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(y - exact) / exact) < 3e-7
    assert y[-1] == 1.0  # a maximum that did not change must not change sums


def test_exp_of_masked_and_broken_values() -> None:
    x = np.zeros(16, np.float32)
    x[:4] = -np.inf, -1e30, np.nan, -87.5
    y = np.empty_like(x)
    _exp(x.ctypes.data, y.ctypes.data, 16)
    assert y[0] == y[1] == y[3] == 0.0
    assert np.isnan(y[2])


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[:8] = 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0x00008000
    x = bits.view(np.float32)
    vectors, scalars = np.empty(len(x), np.uint16), np.empty(len(x), np.uint16)
    _round(x.ctypes.data, vectors.ctypes.data, scalars.ctypes.data, len(x))
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(vectors[number], expected.view(np.uint16)[number])
    assert np.isnan(vectors.view(ml_dtypes.bfloat16)[~number].astype(np.float32)).all()
    np.testing.assert_array_equal(scalars, vectors)


def test_lanes_outside_are_dropped_even_when_nan() -> None:
    x = np.full(16, np.nan, np.float32)
    x[3:7] = 1.0, -2.0, 8.0, 0.5
    assert _reduce(x.ctypes.data, 3, 7) == (7.5, 8.0)
    assert _reduce(x.ctypes.data, -5, 0) == (0.0, 0.0)


def test_half() -> None:
    values = np.array([0.0, -1.5, 65504.0, 6e-8], np.float16)
    assert [_half(bits) for bits in values.view(np.uint16)] == values.astype(np.float32).tolist()
