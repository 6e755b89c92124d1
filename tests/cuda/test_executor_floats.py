"""Float instructions against exact fractions rounded here, ml_dtypes and float64."""

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cupy", reason="the executor compiles through CuPy's wrapper of NVRTC: install the extra test-cuda")

from tests.cuda.ptx_kernels import run_lanes

pytestmark = pytest.mark.cuda

BF16 = np.dtype(ml_dtypes.bfloat16)
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    math.inf,
    -math.inf,
    math.nan,
    1e-40,
    -1e-45,
    3.4e38,
    65504.0,
    65520.0,
    2.5,
    127.5,
    -128.5,
]


def floats(seed: int, dtype: Any = np.float32, count: int = 300) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(count) * np.exp2(rng.integers(-20, 20, count))
    with np.errstate(over="ignore"):
        return np.where(rng.random(count) < 0.3, rng.choice(SPECIAL, count), values).astype(dtype)


def rounded(exact: Fraction, mode: str) -> np.float32:
    """An exact value as the float32 that `mode` gives; the value is neither huge nor zero."""
    nearest = np.float32(float(exact))  # double rounding is corrected below
    candidates = sorted({float(np.nextafter(nearest, np.float32(s * math.inf))) for s in (-1, 1)} | {float(nearest)})
    if mode == "rn":
        return np.float32(min(candidates, key=lambda c: (abs(Fraction(c) - exact), np.float32(c).view(np.uint32) & 1)))
    below = max(c for c in candidates if Fraction(c) <= exact)
    above = min(c for c in candidates if Fraction(c) >= exact)
    toward_zero = below if exact > 0 else above
    return np.float32({"rm": below, "rp": above, "rz": toward_zero}[mode])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_rounding_modes(mode: str) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(200).astype(np.float32) for _ in range(3))
    code = f"""
        add.{mode}.f32 %d0, %a0, %a1; mul.{mode}.f32 %d1, %a0, %a1; fma.{mode}.f32 %d2, %a0, %a1, %a2;
        div.{mode}.f32 %d3, %a0, %a1; rcp.{mode}.f32 %d4, %a0; cvt.{mode}.f32.f64 %d5, %a3;
    """
    wide = rng.standard_normal(200)
    d = run_lanes(code, [a, b, c, wide], [np.float32] * 6)
    for i in range(200):
        x, y, z, w = (Fraction(float(v[i])) for v in (a, b, c, wide))
        expected = [rounded(e, mode) for e in (x + y, x * y, x * y + z, x / y, 1 / x, w)]
        assert [v[i] for v in d] == expected


def same(actual: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Bit for bit, but any NaN equals any."""
    bits = f"u{actual.dtype.itemsize}"
    with np.errstate(all="ignore"):  # signalling NaNs
        nan = np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64))
        expected = expected.astype(actual.dtype)
    return bool(np.all(nan | (actual.view(bits) == expected.view(bits))))


def flushed(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)


def test_flush_saturate_and_extrema() -> None:
    a, b = floats(2), floats(3)
    code = """
        add.f32 %d0, %a0, %a1; add.ftz.f32 %d1, %a0, %a1; mul.sat.f32 %d2, %a0, %a1;
        min.f32 %d3, %a0, %a1; max.NaN.f32 %d4, %a0, %a1; neg.f32 %d5, %a0; abs.ftz.f32 %d6, %a0;
        copysign.f32 %d7, %a0, %a1; sqrt.rn.f32 %d8, %a0;
    """
    d = run_lanes(code, [a, b], [np.float32] * 9)
    with np.errstate(all="ignore"):
        product = a * b
        assert same(d[0], a + b)
        assert same(d[1], flushed(flushed(a) + flushed(b)))
        assert same(d[2], np.where(np.isnan(product), 0, np.clip(product, 0, 1)).astype(np.float32) + np.float32(0))
        assert np.array_equal(d[3], np.fmin(a, b), equal_nan=True)
        assert np.array_equal(d[4], np.maximum(a, b), equal_nan=True)
        assert same(d[5], -a) and same(d[6], flushed(np.abs(a)))
        assert same(d[7], np.copysign(b, a))  # the sign of the first operand, the magnitude of the second
        assert same(d[8], np.sqrt(a))


def test_float_comparisons_know_unordered() -> None:
    a, b = floats(4), floats(5)
    b[::4] = a[::4]
    tests = ["lt", "leu", "ne", "neu", "equ", "num", "nan"]
    code = "".join(f"setp.{t}.f32 %q0, %a0, %a1; selp.u32 %d{i}, 1, 0, %q0;" for i, t in enumerate(tests))
    d = run_lanes(code, [a, b], [np.uint32] * len(tests))
    nan = np.isnan(a) | np.isnan(b)
    expected = [(a < b), (a <= b) | nan, (a != b) & ~nan, (a != b) | nan, (a == b) | nan, ~nan, nan]
    for actual, truth in zip(d, expected, strict=True):
        assert np.array_equal(actual, truth)


def test_approximate_functions_are_close() -> None:
    a = np.random.default_rng(6).uniform(0.1, 8, 200).astype(np.float32)
    names = ["ex2", "lg2", "rsqrt", "rcp", "sin", "cos", "tanh", "sqrt"]
    code = "".join(f"{name}.approx.f32 %d{i}, %a0;" for i, name in enumerate(names))
    code += "div.full.f32 %d8, %a0, %a0; ex2.approx.ftz.f32 %d9, %a0;"
    d = run_lanes(code, [a], [np.float32] * 10)
    x = a.astype(np.float64)
    references = [
        np.exp2(x),
        np.log2(x),
        x**-0.5,
        1 / x,
        np.sin(x),
        np.cos(x),
        np.tanh(x),
        np.sqrt(x),
        x / x,
        np.exp2(x),
    ]
    for actual, reference in zip(d, references, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=2e-7, atol=2e-7)


def test_doubles() -> None:
    a, b = floats(7, np.float64), floats(8, np.float64)
    code = """
        fma.rn.f64 %d0, %a0, %a1, %a0; div.rn.f64 %d1, %a0, %a1; max.f64 %d2, %a0, %a1; rcp.approx.ftz.f64 %d3, %a0;
    """
    d = run_lanes(code, [a, b], [np.float64] * 4)
    with np.errstate(all="ignore"):
        assert same(d[1], a / b) and np.array_equal(d[2], np.fmax(a, b), equal_nan=True)
        finite = np.isfinite(a) & np.isfinite(b) & (a != 0)
        exact = [Fraction(x) * Fraction(y) + Fraction(x) for x, y in zip(a[finite], b[finite], strict=True)]
        assert d[0][finite].tolist() == [float(e) for e in exact]  # CPython rounds fractions correctly
        np.testing.assert_allclose(d[3][finite], 1 / a[finite], rtol=1e-6)
        assert not (d[3].view(np.uint64) & np.uint64(0xFFFFFFFF)).any()


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_to_integers_clamps_and_rounds(mode: str) -> None:
    with np.errstate(over="ignore"):
        a = floats(9) * np.float32(7)
    a[:4] = [2.5, 3.5, -2.5, 0.5]
    code = f"""
        cvt.{mode}.s32.f32 %d0, %a0; cvt.{mode}.u8.f32 %h0, %a0; cvt.u32.u16 %d1, %h0; cvt.{mode}.u64.f32 %d2, %a0;
        cvt.{mode}.f32.f32 %d3, %a0; cvt.{mode}.sat.s8.f32 %r0, %a0; cvt.s32.s8 %d4, %r0;
    """
    d = run_lanes(code, [a], [np.int32, np.uint32, np.uint64, np.float32, np.int32])
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](a.astype(np.float64))
    clean = np.nan_to_num(whole, nan=0.0)
    for actual, low, high in ((d[0], -(2**31), 2**31 - 1), (d[1], 0, 255), (d[2], 0, 2**64 - 1), (d[4], -128, 127)):
        assert actual.tolist() == [max(low, min(high, int(max(-1e30, min(1e30, x))))) for x in clean]
    assert same(d[3], whole.astype(np.float32))


def test_integers_to_floats() -> None:
    rng = np.random.default_rng(10)
    a = rng.integers(-(2**62), 2**62, 200)
    code = """
        cvt.rn.f32.s64 %d0, %a0; cvt.rz.f32.s64 %d1, %a0; cvt.rm.f32.s64 %d2, %a0; cvt.rn.f64.s64 %d3, %a0;
        cvt.u32.u64 %r0, %a0; cvt.rn.f32.u32 %d4, %r0; cvt.rn.f16.s16 %h0, %r0; mov.b16 %d5, %h0;
    """
    d = run_lanes(code, [a], [np.float32] * 3 + [np.float64, np.float32, np.float16])
    for i, x in enumerate(a.tolist()):
        assert [d[j][i] for j in range(3)] == [rounded(Fraction(x), mode) for mode in ("rn", "rz", "rm")]
    assert np.array_equal(d[3], a.astype(np.float64)) and np.array_equal(d[4], a.astype(np.uint32).astype(np.float32))
    assert np.array_equal(d[5], a.astype(np.int16).astype(np.float16))


def test_every_16_bit_float_widens_and_comes_back() -> None:
    for name, dtype in (("f16", np.dtype(np.float16)), ("bf16", BF16)):
        a = np.arange(65536, dtype=np.uint16)
        d = run_lanes(f"cvt.f32.{name} %d0, %a0; cvt.rn.{name}.f32 %d1, %d0;", [a], [np.float32, np.uint16])
        with np.errstate(all="ignore"):
            assert same(d[0], a.view(dtype).astype(np.float32))
        assert same(d[1].view(dtype), a.view(dtype))


def test_narrowing_rounds_to_nearest_even() -> None:
    a, b = floats(11, count=2000), floats(12, count=2000)
    ties = np.arange(1, 400, dtype=np.uint32) << np.uint32(12) | np.uint32(0x3F800000)  # halfway between f16 values
    a[:399] = ties.view(np.float32)
    code = """
        cvt.rn.f16.f32 %d0, %a0; cvt.rn.bf16.f32 %d1, %a0; cvt.rn.bf16x2.f32 %d2, %a0, %a1;
        cvt.rn.f16x2.f32 %d3, %a0, %a1; cvt.rz.bf16.f32 %d4, %a0; cvt.rn.relu.bf16x2.f32 %d5, %a0, %a1;
    """
    d = run_lanes(code, [a, b], [np.float16, BF16, np.uint32, np.uint32, np.uint16, np.uint32])
    with np.errstate(over="ignore"):
        assert same(d[0], a.astype(np.float16)) and same(d[1], a.astype(BF16))
        for packed, dtype in ((d[2], BF16), (d[3], np.dtype(np.float16))):
            halves = packed.view(dtype).reshape(-1, 2)  # the first source is the upper half
            assert same(halves[:, 1].copy(), a.astype(dtype)) and same(halves[:, 0].copy(), b.astype(dtype))
    usual = np.isfinite(a)
    assert np.array_equal(d[4][usual], (a.view(np.uint32) >> np.uint32(16)).astype(np.uint16)[usual])
    assert np.array_equal(d[5].view(BF16).reshape(-1, 2)[:, 1][usual], np.maximum(a, 0).astype(BF16)[usual])


@pytest.mark.parametrize(
    ("name", "dtype", "top"), [("e4m3", ml_dtypes.float8_e4m3fn, 448), ("e5m2", ml_dtypes.float8_e5m2, 57344)]
)
def test_fp8(name: str, dtype: Any, top: int) -> None:
    a, b = floats(13, count=2000), floats(14, count=2000)
    d = run_lanes(
        f"cvt.rn.satfinite.{name}x2.f32 %d0, %a0, %a1; cvt.rn.f16x2.{name}x2 %d1, %d0;", [a, b], [np.uint16, np.uint32]
    )
    pairs, back = d[0].view(np.uint8).reshape(-1, 2), d[1].view(np.float16).reshape(-1, 2)
    for column, source in ((1, a), (0, b)):
        number = ~np.isnan(source)
        expected = np.clip(source, -top, top).astype(dtype).view(np.uint8)
        assert np.array_equal(pairs[number, column], expected[number])
        assert np.isnan(pairs[~number, column].view(dtype).astype(np.float32)).all()
        assert np.array_equal(back[number, column], expected[number].view(dtype).astype(np.float16))


def test_16_bit_arithmetic() -> None:
    for name, dtype in (("f16", np.dtype(np.float16)), ("bf16", BF16)):
        rng = np.random.default_rng(15)
        a, b, c = (rng.standard_normal((200, 2)).astype(dtype) for _ in range(3))
        x, y, z = (v.astype(np.float64) for v in (a, b, c))
        code = f"""
            add.{name}x2 %d0, %a0, %a1; mul.{name}x2 %d1, %a0, %a1; fma.rn.{name}x2 %d2, %a0, %a1, %a2;
            max.{name}x2 %d3, %a0, %a1; neg.{name}x2 %d4, %a0; fma.rn.relu.{name}x2 %d5, %a0, %a1, %a2;
            setp.gt.{name}x2 %q0|%q1, %a0, %a1; selp.u32 %r0, 1, 0, %q0; selp.u32 %r1, 2, 0, %q1; or.b32 %d6, %r0, %r1;
        """
        packed = [v.view(np.uint32).ravel() for v in (a, b, c)]
        d = run_lanes(code, packed, [np.uint32] * 7)
        expected = [x + y, x * y, x * y + z, np.maximum(x, y), -x, np.maximum(x * y + z, 0)]
        for actual, exact in zip(d, expected, strict=False):
            assert np.array_equal(actual.view(dtype).reshape(-1, 2).astype(float), exact.astype(dtype).astype(float))
        assert np.array_equal(d[6], (x > y) @ np.array([1, 2]))
