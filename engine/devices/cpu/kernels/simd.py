"""Sixteen float32 lanes as a Numba value, and typed pointers to load and store them.

Kernels are written with explicit lanes rather than left to the auto-vectorizer for two reasons: speed does not
depend on what LLVM recognises, and the order of every sum is written down. The second is what makes a row's result
independent of its batch: no reassociation or contraction is ever permitted (`fastmath` stays off), `fma` is
asked for by name. LLVM splits the 16 lanes where registers are narrower, with the same results.

Pointers are Numba `CPointer`s made from integer addresses: `p[i]` reads and writes without bounds checks.
Read next: `engine/devices/cpu/kernels/ops.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import math
import operator
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped, unused-ignore]
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import extending, types
from numba.extending import models, overload, register_model

from engine.devices.cpu.kernels.constants import LANES
from engine.devices.cpu.kernels.jit import inner

intrinsic: Any = extending.intrinsic

_F32 = ir.FloatType()
_F64 = ir.DoubleType()
_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_V32 = ir.VectorType(_F32, LANES)
_V64 = ir.VectorType(_F64, LANES)
_VI8 = ir.VectorType(_I8, LANES)
_VI16 = ir.VectorType(_I16, LANES)
_VI32 = ir.VectorType(_I32, LANES)


HAS_AVX512 = bool(llvm.get_host_cpu_features().get("avx512dq"))
HAS_BFLOAT16_DOT = bool(llvm.get_host_cpu_features().get("avx512bf16"))


class F32x16Type(types.Type):
    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = F32x16Type()


@register_model(F32x16Type)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _V32)


def _pointer_maker(pointee: Any) -> Any:
    @intrinsic
    def pointer(typingctx, address):
        """Typed pointer to an integer address."""

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(pointee)(types.int64), codegen

    return pointer


f32_pointer = _pointer_maker(types.float32)
f64_pointer = _pointer_maker(types.float64)
i8_pointer = _pointer_maker(types.int8)
u8_pointer = _pointer_maker(types.uint8)
u16_pointer = _pointer_maker(types.uint16)
i32_pointer = _pointer_maker(types.int32)
i64_pointer = _pointer_maker(types.int64)


def _splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(_VI32, [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _f32(value: float) -> Any:
    return ir.Constant(_V32, [float(np.float32(value))] * LANES)


def _i32(value: int) -> Any:
    return ir.Constant(_VI32, [value] * LANES)


def _call(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(args[0].type, [a.type for a in args])
    module = builder.module
    function = module.globals.get(name) or ir.Function(module, kind, name)
    return builder.call(function, args)


def _round_to_bfloat(builder: Any, value: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even, of a float or a vector of them; NaN stays NaN.

    Not the hardware's conversion: that one flushes denormals.
    """
    wide, narrow = (_VI32, _VI16) if value.type == _V32 else (_I32, _I16)

    def constant(number: int) -> Any:
        return _i32(number) if wide == _VI32 else ir.Constant(_I32, number)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, constant(0x7FC0), rounded), narrow)


@intrinsic
def load(typingctx, pointer, index):
    """Lanes pointer[index : index + 16]; a uint16 pointer holds bfloat16, int8 is converted, float64 is rounded."""
    pointee = pointer.dtype

    def codegen(context, builder, signature, args):
        address = builder.gep(args[0], [args[1]])
        if pointee == types.float32:
            return builder.load(builder.bitcast(address, _V32.as_pointer()), align=4)
        if pointee == types.float64:
            return builder.fptrunc(builder.load(builder.bitcast(address, _V64.as_pointer()), align=8), _V32)
        if pointee == types.int8:
            return builder.sitofp(builder.load(builder.bitcast(address, _VI8.as_pointer()), align=1), _V32)
        bits = builder.load(builder.bitcast(address, _VI16.as_pointer()), align=2)
        return builder.bitcast(builder.shl(builder.zext(bits, _VI32), _i32(16)), _V32)

    return f32x16(pointer, types.int64), codegen


@intrinsic
def store(typingctx, pointer, index, value):
    """Write pointer[index : index + 16]; to a uint16 pointer as bfloat16, to the nearest, ties to even."""
    pointee = pointer.dtype

    def codegen(context, builder, signature, args):
        address, vector = builder.gep(args[0], [args[1]]), args[2]
        if pointee == types.float32:
            builder.store(vector, builder.bitcast(address, _V32.as_pointer()), align=4)
        else:
            rounded = _round_to_bfloat(builder, vector)
            builder.store(rounded, builder.bitcast(address, _VI16.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, f32x16), codegen


def _narrow(builder: Any, value: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even; denormals may become zero."""
    if not HAS_BFLOAT16_DOT:
        return _round_to_bfloat(builder, value)
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    function = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(_VI16, [_V32]), name)
    return builder.call(function, [value])


@intrinsic
def store_narrow(typingctx, pointer, index, value):
    """Write bfloat16 lanes to pointer[index : index + 16] for a dot product, which takes denormals as zero."""

    def codegen(context, builder, signature, args):
        address = builder.gep(args[0], [args[1]])
        builder.store(_narrow(builder, args[2]), builder.bitcast(address, _VI16.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, f32x16), codegen


@intrinsic
def store_pairs(typingctx, pointer, index, a, b):
    """Write a[0], b[0], a[1], b[1] and so on as bfloat16 to pointer[index : index + 32], as `store_narrow`."""

    def codegen(context, builder, signature, args):
        low, high = (builder.zext(_narrow(builder, value), _VI32) for value in args[2:])
        pairs = builder.or_(low, builder.shl(high, _i32(16)))
        address = builder.gep(args[0], [args[1]])
        builder.store(pairs, builder.bitcast(address, _VI32.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, f32x16, f32x16), codegen


@intrinsic
def store_low_bytes(typingctx, pointer, index, value):
    """Write the lowest byte of each lane's bits to pointer[index : index + 16]."""

    def codegen(context, builder, signature, args):
        address, vector = builder.gep(args[0], [args[1]]), args[2]
        narrow = ir.VectorType(ir.IntType(8), LANES)
        low = builder.trunc(builder.bitcast(vector, _VI32), narrow)
        builder.store(low, builder.bitcast(address, narrow.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, f32x16), codegen


@intrinsic
def splat(typingctx, scalar):
    """All lanes equal to a float32."""

    def codegen(context, builder, signature, args):
        return _splat(builder, args[0])

    return f32x16(types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once."""

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.fma.v16f32", *args)

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def maximum(typingctx, a, b):
    """Lane-wise larger; a where either is NaN."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[1], args[0])

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def keep_lanes(typingctx, value, begin, end, other):
    """Lanes begin <= i < end of `value`, the rest of `other`, whatever the rest held (NaN included)."""

    def codegen(context, builder, signature, args):
        lanes = ir.Constant(_VI32, list(range(LANES)))
        low, high = (_splat(builder, builder.trunc(a, _I32)) for a in args[1:3])
        inside = builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high))
        return builder.select(inside, args[0], args[3])

    return f32x16(f32x16, types.int64, types.int64, f32x16), codegen


def _reduction(combine: Any) -> Any:
    @intrinsic
    def reduce(typingctx, value):
        """Fold the lanes as a binary tree: lane i with lane i + 8, then + 4, + 2, + 1."""

        def codegen(context, builder, signature, args):
            folded, width = args[0], LANES
            while width > 1:
                width //= 2
                low = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
                high = ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
                folded = combine(
                    builder, builder.shuffle_vector(folded, folded, low), builder.shuffle_vector(folded, folded, high)
                )
            return builder.extract_element(folded, ir.Constant(_I32, 0))

        return types.float32(f32x16), codegen

    return reduce


reduce_add = _reduction(lambda builder, a, b: builder.fadd(a, b))
reduce_max = _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a))


def _operator(python_operator: Any, emit: str) -> None:
    @intrinsic
    def lane_wise(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return getattr(builder, emit)(*args)

        return f32x16(f32x16, f32x16), codegen

    @overload(python_operator)
    def implementation(a, b):
        if isinstance(a, F32x16Type) and isinstance(b, F32x16Type):
            return lambda a, b: lane_wise(a, b)
        return None


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")

_EXP_LOWEST = -87.0
"""Below it exp is returned as exactly 0: 2**-126 is near, and a masked score must weigh nothing."""
_EXP_HIGHEST = 88.0
_EXP_COEFFICIENTS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
_ROUNDER = 1.5 * 2**23
"""Added to |x| < 2**22 it leaves round(x) in the low bits of the sum's mantissa."""


@intrinsic
def exp(typingctx, x):
    """e**x to 2 ulp: Cody-Waite reduction to |r| <= ln2 / 2, Taylor polynomial of degree 6, 2**n by exponent bits.

    0 below -87 and for -inf; e**88 above 88; NaN stays NaN.
    """

    def codegen(context, builder, signature, args):
        (x,) = args
        high = builder.select(builder.fcmp_ordered(">", x, _f32(_EXP_HIGHEST)), _f32(_EXP_HIGHEST), x)
        clamped = builder.select(builder.fcmp_ordered("<", high, _f32(_EXP_LOWEST)), _f32(_EXP_LOWEST), high)
        shifted = _call(builder, "llvm.fma.v16f32", clamped, _f32(1 / math.log(2)), _f32(_ROUNDER))
        n = builder.fsub(shifted, _f32(_ROUNDER))
        r = _call(builder, "llvm.fma.v16f32", n, _f32(-0.693359375), clamped)
        r = _call(builder, "llvm.fma.v16f32", n, _f32(2.12194440e-4), r)
        result = _f32(_EXP_COEFFICIENTS[0])
        for coefficient in _EXP_COEFFICIENTS[1:]:
            result = _call(builder, "llvm.fma.v16f32", result, r, _f32(coefficient))
        exponent = builder.shl(builder.bitcast(shifted, _VI32), _i32(23))
        scaled = builder.bitcast(builder.add(builder.bitcast(result, _VI32), exponent), _V32)
        too_low = builder.fcmp_ordered("<", x, _f32(_EXP_LOWEST))
        is_nan = builder.fcmp_unordered("uno", x, x)
        return builder.select(is_nan, x, builder.select(too_low, _f32(0.0), scaled))

    return f32x16(f32x16), codegen


_EXP2_COEFFICIENTS = (0.01342669725, 0.05224245113, 0.24128021744, 0.6930448428, 1.0)
"""2**x on [0, 1] to 3e-6, least squares with weights towards the largest error; exactly 1 at 0."""


@intrinsic
def exp2(typingctx, x):
    """2**x to 3e-6: for weights that are rounded to bfloat16. 1 for 0, 0 for -inf, NaN stays NaN."""

    def codegen(context, builder, signature, args):
        (x,) = args
        if HAS_AVX512:
            mask, floor, direction = (ir.Constant(ir.IntType(n), v) for n, v in ((16, -1), (32, 9), (32, 4)))
            fraction = _masked(builder, "llvm.x86.avx512.mask.reduce.ps.512", x, floor, x, mask, direction)
            return _masked(
                builder, "llvm.x86.avx512.mask.scalef.ps.512", _polynomial(builder, fraction), x, x, mask, direction
            )
        low = builder.fcmp_ordered("<", x, _f32(-126.0))
        clamped = builder.select(low, _f32(-126.0), x)
        whole = _call(builder, "llvm.floor.v16f32", clamped)
        result = _polynomial(builder, builder.fsub(clamped, whole))
        shifted = builder.fadd(whole, _f32(_ROUNDER))
        exponent = builder.shl(builder.bitcast(shifted, _VI32), _i32(23))
        scaled = builder.bitcast(builder.add(builder.bitcast(result, _VI32), exponent), _V32)
        is_nan = builder.fcmp_unordered("uno", x, x)
        return builder.select(is_nan, x, builder.select(low, _f32(0.0), scaled))

    return f32x16(f32x16), codegen


def _polynomial(builder: Any, x: Any) -> Any:
    result = _f32(_EXP2_COEFFICIENTS[0])
    for coefficient in _EXP2_COEFFICIENTS[1:]:
        result = _call(builder, "llvm.fma.v16f32", result, x, _f32(coefficient))
    return result


def _masked(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(_V32, [arg.type for arg in args])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), args)


@intrinsic
def put(typingctx, pointer, index, value):
    """pointer[index] = value; a uint16 pointer takes bfloat16, int8 an integer, each the nearest, ties to even."""
    pointee = pointer.dtype

    def codegen(context, builder, signature, args):
        value = args[2]
        if pointee == types.int8:
            value = builder.fptosi(_call(builder, "llvm.rint.f32", value), _I8)
        elif pointee != types.float32:
            value = _round_to_bfloat(builder, value)
        builder.store(value, builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), codegen


@inner
def pad(width):
    """`width` rounded up to whole vectors."""
    return (width + LANES - 1) // LANES * LANES
