"""Integer and bit instructions against Python's unbounded integers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cupy", reason="the executor compiles through CuPy's wrapper of NVRTC: install the extra test-cuda")

from tests.cuda.ptx_kernels import run_lanes

pytestmark = pytest.mark.cuda

EDGES = [
    0,
    1,
    2,
    5,
    31,
    32,
    33,
    63,
    64,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    0x12345678,
]


def operands(bits: int, seed: int, count: int = 200) -> NDArray[Any]:
    """Edge cases and random values, as unsigned integers."""
    dtype = np.dtype(f"u{bits // 8}")
    edges = [e & (1 << bits) - 1 for e in EDGES] + [(1 << bits) - 1, 1 << bits - 1]
    rng = np.random.default_rng(seed)
    mixed = rng.choice(np.array(edges, np.uint64), count)
    return np.where(rng.random(count) < 0.5, mixed, rng.integers(0, 1 << bits, count, np.uint64, bits < 64)).astype(
        dtype
    )


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> bits - 1 else x


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


Reference = Callable[..., int]
BINARY: list[tuple[str, str, Reference]] = [
    ("add", "u32", lambda a, b: a + b),
    ("add", "s64", lambda a, b: a + b),
    ("add", "s16", lambda a, b: a + b),
    ("add.sat", "s32", lambda a, b: max(-(2**31), min(2**31 - 1, a + b))),
    ("sub", "u32", lambda a, b: a - b),
    ("sub.sat", "s32", lambda a, b: max(-(2**31), min(2**31 - 1, a - b))),
    ("mul.lo", "s32", lambda a, b: a * b),
    ("mul.lo", "u64", lambda a, b: a * b),
    ("mul.hi", "s32", lambda a, b: a * b >> 32),
    ("mul.hi", "u32", lambda a, b: a * b >> 32),
    ("mul.hi", "u64", lambda a, b: a * b >> 64),
    ("mul.hi", "s64", lambda a, b: a * b >> 64),
    ("mul24.lo", "u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    ("mul24.lo", "s32", lambda a, b: signed(a & 0xFFFFFF, 24) * signed(b & 0xFFFFFF, 24)),
    ("div", "s32", lambda a, b: truncated(a, b) if b else -1),
    ("div", "u32", lambda a, b: a // b if b else -1),
    ("div", "u64", lambda a, b: a // b if b else -1),
    ("rem", "s32", lambda a, b: a - b * truncated(a, b) if b else a),
    ("rem", "u32", lambda a, b: a % b if b else a),
    ("min", "s32", min),
    ("max", "s32", max),
    ("min", "u64", min),
    ("max", "u16", max),
    ("and", "b32", lambda a, b: a & b),
    ("or", "b64", lambda a, b: a | b),
    ("xor", "b16", lambda a, b: a ^ b),
]  # fmt: skip


@pytest.mark.parametrize(("op", "t", "reference"), BINARY, ids=[f"{op}.{t}" for op, t, _ in BINARY])
def test_binary(op: str, t: str, reference: Reference) -> None:
    bits = int(t[1:])
    a, b = operands(bits, 1), operands(bits, 2)
    [d] = run_lanes(f"{op}.{t} %d0, %a0, %a1;", [a, b], [a.dtype])
    convert = (lambda x: signed(int(x), bits)) if t[0] == "s" else int
    expected = [reference(convert(x), convert(y)) & (1 << bits) - 1 for x, y in zip(a, b, strict=True)]
    assert d.tolist() == expected


UNARY: list[tuple[str, str, int, Reference]] = [
    ("abs", "s32", 32, lambda a: abs(signed(a, 32))),
    ("neg", "s32", 32, lambda a: -a),
    ("not", "b32", 32, lambda a: ~a),
    ("cnot", "b32", 32, lambda a: int(a == 0)),
    ("popc", "b32", 32, lambda a: a.bit_count()),
    ("popc", "b64", 32, lambda a: a.bit_count()),
    ("clz", "b32", 32, lambda a: 32 - a.bit_length()),
    ("clz", "b64", 32, lambda a: 64 - a.bit_length()),
    ("brev", "b32", 32, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("brev", "b64", 64, lambda a: int(f"{a:064b}"[::-1], 2)),
    ("bfind", "u32", 32, lambda a: a.bit_length() - 1),
    ("bfind.shiftamt", "u32", 32, lambda a: 32 - a.bit_length() if a else -1),
    ("bfind", "s32", 32, lambda a: (~a & 0xFFFFFFFF if a >> 31 else a).bit_length() - 1),
]  # fmt: skip


@pytest.mark.parametrize(("op", "t", "out_bits", "reference"), UNARY, ids=[f"{u[0]}.{u[1]}" for u in UNARY])
def test_unary(op: str, t: str, out_bits: int, reference: Reference) -> None:
    a = operands(int(t[1:]), 3)
    [d] = run_lanes(f"{op}.{t} %d0, %a0;", [a], [f"u{out_bits // 8}"])
    assert d.tolist() == [reference(int(x)) & (1 << out_bits) - 1 for x in a]


def test_wide_products_and_multiply_add() -> None:
    a, b, c = (operands(32, seed) for seed in (4, 5, 6))
    wide = operands(64, 7)
    code = """
        mul.wide.s32 %d0, %a0, %a1;
        mad.wide.u32 %d1, %a0, %a1, %a3;
        mad.lo.s32 %d2, %a0, %a1, %a2;
        mad.hi.u32 %d3, %a0, %a1, %a2;
        sad.s32 %d4, %a0, %a1, %a2;
    """
    d = run_lanes(code, [a, b, c, wide], [np.uint64, np.uint64, np.uint32, np.uint32, np.uint32])
    for i, (x, y, z, w) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), wide.tolist(), strict=True)):
        assert d[0][i] == signed(x, 32) * signed(y, 32) & (1 << 64) - 1
        assert d[1][i] == x * y + w & (1 << 64) - 1
        assert d[2][i] == x * y + z & 0xFFFFFFFF
        assert d[3][i] == (x * y >> 32) + z & 0xFFFFFFFF
        assert d[4][i] == abs(signed(x, 32) - signed(y, 32)) + z & 0xFFFFFFFF


def test_shifts_clamp_and_funnel_shifts_wrap() -> None:
    a, b, n = operands(32, 8), operands(32, 9), operands(32, 10)
    code = """
        shl.b32 %d0, %a0, %a2; shr.u32 %d1, %a0, %a2; shr.s32 %d2, %a0, %a2;
        shf.l.wrap.b32 %d3, %a0, %a1, %a2; shf.r.clamp.b32 %d4, %a0, %a1, %a2;
    """
    d = run_lanes(code, [a, b, n], [np.uint32] * 5)
    for i, (x, y, s) in enumerate(zip(a.tolist(), b.tolist(), n.tolist(), strict=True)):
        both = y << 32 | x
        assert d[0][i] == (x << min(s, 32)) & 0xFFFFFFFF
        assert d[1][i] == x >> min(s, 32)
        assert d[2][i] == signed(x, 32) >> min(s, 31) & 0xFFFFFFFF
        assert d[3][i] == both >> 32 - s % 32 & 0xFFFFFFFF
        assert d[4][i] == both >> min(s, 32) & 0xFFFFFFFF


def test_bit_fields() -> None:
    a, b = operands(32, 11), operands(32, 12)
    rng = np.random.default_rng(13)
    position, length = (rng.integers(0, 40, len(a)).astype(np.uint32) for _ in range(2))
    code = """
        bfe.u32 %d0, %a0, %a2, %a3; bfe.s32 %d1, %a0, %a2, %a3; bfi.b32 %d2, %a0, %a1, %a2, %a3;
    """
    d = run_lanes(code, [a, b, position, length], [np.uint32] * 3)
    for i, (x, y, p, n) in enumerate(zip(a.tolist(), b.tolist(), position.tolist(), length.tolist(), strict=True)):
        field = x >> p & (1 << n) - 1
        sign = x >> min(p + n - 1, 31) & 1 if n else 0
        filled = field | (~0 << min(n, max(0, 32 - p)) if sign else 0)
        assert d[0][i] == field
        assert d[1][i] == filled & 0xFFFFFFFF
        mask = ((1 << n) - 1 << p) & 0xFFFFFFFF
        assert d[2][i] == (y & ~mask | x << p & mask) & 0xFFFFFFFF


def test_logic_tables_permutes_and_byte_dot_products() -> None:
    a, b, c = (operands(32, seed) for seed in (14, 15, 16))
    code = """
        lop3.b32 %d0, %a0, %a1, %a2, 0xe8; lop3.b32 %d1, %a0, %a1, %a2, 0x1d;
        prmt.b32 %d2, %a0, %a1, %a2; dp4a.s32.s32 %d3, %a0, %a1, %a2; dp4a.u32.s32 %d4, %a0, %a1, %a2;
    """
    d = run_lanes(code, [a, b, c], [np.uint32] * 5)
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        assert d[0][i] == x & y | x & z | y & z  # majority
        assert d[1][i] == sum(
            (0x1D >> ((x >> k & 1) * 4 + (y >> k & 1) * 2 + (z >> k & 1)) & 1) << k for k in range(32)
        )
        pool = (y << 32 | x).to_bytes(8, "little")
        chosen = [(pool[z >> 4 * k & 7], z >> 4 * k & 8) for k in range(4)]
        assert d[2][i] == int.from_bytes(bytes((255 * (v >> 7)) if sign else v for v, sign in chosen), "little")
        xs, ys = (np.frombuffer(v.to_bytes(4, "little"), np.int8).astype(int) for v in (x, y))
        assert d[3][i] == int(xs @ ys) + z & 0xFFFFFFFF
        assert d[4][i] == int((xs & 255) @ ys) + z & 0xFFFFFFFF


def test_carries() -> None:
    a, b = operands(64, 17), operands(64, 18)
    code = """
        mov.b64 {%r0, %r1}, %a0; mov.b64 {%r2, %r3}, %a1;
        add.cc.u32 %r4, %r0, %r2; addc.u32 %r5, %r1, %r3; mov.b64 %d0, {%r4, %r5};
        sub.cc.u32 %r4, %r0, %r2; subc.u32 %r5, %r1, %r3; mov.b64 %d1, {%r4, %r5};
    """
    total, difference = run_lanes(code, [a, b], [np.uint64, np.uint64])
    assert np.array_equal(total, a + b) and np.array_equal(difference, a - b)


def test_comparisons_and_selects() -> None:
    a, b = operands(32, 19), operands(32, 20)
    b[::3] = a[::3]
    code = """
        setp.lt.s32 %q0|%q1, %a0, %a1; setp.hs.u32 %q2, %a0, %a1; setp.eq.and.u32 %q3, %a0, %a1, !%q0;
        selp.b32 %d0, %a0, %a1, %q0; selp.b32 %d1, 1, 0, %q1; selp.b32 %d2, 1, 0, %q2; selp.b32 %d3, 1, 0, %q3;
        slct.s32.s32 %d4, %a0, %a1, %a1; set.gt.u32.s32 %d5, %a0, %a1;
    """
    d = run_lanes(code, [a, b], [np.uint32] * 6)
    less, sa, sb = a.view(np.int32) < b.view(np.int32), a.view(np.int32), b.view(np.int32)
    assert np.array_equal(d[0], np.where(less, a, b)) and np.array_equal(d[1], ~less)
    assert np.array_equal(d[2], a >= b) and np.array_equal(d[3], a == b)
    assert np.array_equal(d[4], np.where(sb >= 0, a, b)) and np.array_equal(d[5], np.where(sa > sb, 0xFFFFFFFF, 0))


def test_moves_between_register_sizes() -> None:
    a = operands(64, 21)
    code = """
        mov.b64 {%h0, %h1, %h2, %h3}, %a0; mov.b64 %d0, {%h3, %h2, %h1, %h0};
        mov.b64 {_, %r0}, %a0; mov.u32 %d1, %r0; cvt.s64.s32 %d2, %r0; cvt.u64.u8 %d3, %a0;
        mov.u32 %d4, %laneid;
    """
    d = run_lanes(code, [a], [np.uint64, np.uint32, np.int64, np.uint64, np.uint32])
    assert np.array_equal(d[0], a.view(np.uint16).reshape(-1, 4)[:, ::-1].copy().view(np.uint64).ravel())
    assert np.array_equal(d[1], (a >> np.uint64(32)).astype(np.uint32))
    assert np.array_equal(d[2], d[1].view(np.int32)) and np.array_equal(d[3], a & np.uint64(255))
    assert np.array_equal(d[4], np.arange(len(a)) % 32)
