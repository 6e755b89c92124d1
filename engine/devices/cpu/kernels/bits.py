"""Scalar numbers from their bits: of what an op holds as an int64, and of formats that Numba has no type for."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import extending, types

intrinsic: Any = extending.intrinsic


@intrinsic
def f64_from_bits(typingctx, bits):
    """The float64 whose bits an int64 holds."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@intrinsic
def half_to_float(typingctx, bits):
    """float32 value of a float16 given as its bits."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def bfloat_to_float(typingctx, bits):
    """float32 value of a bfloat16 given as its bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(
            builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16)), ir.FloatType()
        )

    return types.float32(types.uint16), codegen
