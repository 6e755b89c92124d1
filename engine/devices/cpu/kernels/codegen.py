"""LLVM code that kernels of matrix products are put together from: vectors, addresses, loops, prefetches.

Read next: `engine/devices/cpu/kernels/matmul.py`, `engine/devices/cpu/kernels/matmul_int8.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import extending

from engine.devices.cpu.kernels.simd import HAS_BFLOAT16_DOT

intrinsic: Any = extending.intrinsic

BLOCK_COLUMNS = 16
"""Outputs in a vector of weights."""

_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
_F32 = ir.VectorType(ir.FloatType(), BLOCK_COLUMNS)
_PAIRS = ir.VectorType(ir.IntType(32), BLOCK_COLUMNS)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
ZERO = ir.Constant(_F32, [0.0] * BLOCK_COLUMNS)


def broadcast(builder: Any, scalar: Any) -> Any:
    """Sixteen lanes of a scalar."""
    vector = ir.VectorType(scalar.type, BLOCK_COLUMNS)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(_PAIRS, [0] * BLOCK_COLUMNS)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def call(builder: Any, name: str, *args: Any) -> Any:
    """An LLVM intrinsic that returns what its first argument is."""
    kind = ir.FunctionType(args[0].type, [arg.type for arg in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, args)


def dot_pairs(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total + a . b per lane of two bfloat16, each 16 x int32."""
    if HAS_BFLOAT16_DOT:
        return call(builder, _DOT, total, a, b)
    sixteen, upper = (ir.Constant(_PAIRS, [value] * BLOCK_COLUMNS) for value in (16, -65536))
    for op, shift in ((builder.and_, upper), (builder.shl, sixteen)):
        x, y = (builder.bitcast(op(pairs, shift), _F32) for pairs in (a, b))
        total = call(builder, "llvm.fma.v16f32", x, y, total)
    return total


def prefetch(builder: Any, address: Any, level: int = 1, writes: bool = False) -> None:
    """Fetch the line at an address, which may be any, into the cache of a level; `writes`: to be written."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(builder.module, kind, "llvm.prefetch.p0")
    options = [ir.Constant(_I32, value) for value in (int(writes), 4 - level, 1)]
    builder.call(function, [builder.inttoptr(address, pointer), *options])


class Address:
    """Byte arithmetic on an integer address."""

    def __init__(self, builder: Any, address: Any) -> None:
        self.builder, self.address = builder, address

    def at(self, *terms: tuple[Any, int]) -> "Address":
        """Plus the sum of value * factor."""
        address = self.address
        for value, factor in terms:
            address = self.builder.add(address, self.builder.mul(value, ir.Constant(_I64, factor)))
        return Address(self.builder, address)

    def load(self, kind: Any, align: int) -> Any:
        return self.builder.load(self.builder.inttoptr(self.address, kind.as_pointer()), align=align)

    def store(self, value: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(self.address, value.type.as_pointer()), align=4)


def open_loop(builder: Any, count: Any, initial: list[Any]) -> tuple[list[Any], Any, Any]:
    """Start `for k in range(count)` that carries sums from their initial values; `close(new sums)` ends it."""
    before, function = builder.block, builder.function
    head, body, end = (function.append_basic_block(name) for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    k = builder.phi(_I64)
    k.add_incoming(ir.Constant(_I64, 0), before)
    sums = [builder.phi(_F32) for _ in initial]
    for total, value in zip(sums, initial, strict=True):
        total.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", k, count), body, end)
    builder.position_at_end(body)

    def close(grown: list[Any]) -> None:
        k.add_incoming(builder.add(k, ir.Constant(_I64, 1)), builder.block)
        for total, new in zip(sums, grown, strict=True):
            total.add_incoming(new, builder.block)
        builder.branch(head)
        builder.position_at_end(end)

    return sums, k, close


def fetch_outputs(builder: Any, rows: int, blocks: int, out: Any, out_stride: Any) -> None:
    """Ask for a tile's lines of the output before it is computed: 512 tokens take 189 ms, not 191."""
    for i in range(rows):
        for j in range(blocks):
            line = Address(builder, out).at((out_stride, i), (ir.Constant(_I64, 64), j))
            prefetch(builder, line.address, writes=True)


def finish(builder: Any, sums: list[Any], blocks: int, out: Any, out_stride: Any, bias: Any, adds: Any) -> None:
    """out = sums + bias + (out if adds)."""
    zero = ir.Constant(_I64, 0)
    before = builder.block
    with builder.if_then(builder.icmp_signed("!=", bias, zero)):
        loaded = [Address(builder, bias).at((ir.Constant(_I64, 64), j)).load(_F32, 4) for j in range(blocks)]
        inside = builder.block
    merged = []
    for value in loaded:
        phi = builder.phi(_F32)
        phi.add_incoming(ZERO, before)
        phi.add_incoming(value, inside)
        merged.append(phi)
    targets = [
        Address(builder, out).at((out_stride, i // blocks), (ir.Constant(_I64, 64), i % blocks))
        for i in range(len(sums))
    ]
    values = [builder.fadd(total, merged[i % blocks]) for i, total in enumerate(sums)]
    with builder.if_else(builder.icmp_signed("!=", adds, zero)) as (then, otherwise):
        with then:
            for target, value in zip(targets, values, strict=True):
                target.store(builder.fadd(value, target.load(_F32, 4)))
        with otherwise:
            for target, value in zip(targets, values, strict=True):
                target.store(value)
