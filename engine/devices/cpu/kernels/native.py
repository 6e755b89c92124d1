"""What Numba code needs from outside Python: a call by address, atomics, and a few calls of the C library.

Addresses are plain int64 arguments, never compiled-in constants, so that the on-disk cache of compiled code stays
valid from one process to the next. Read next: `engine/devices/cpu/kernels/teamwork.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import extending, types

intrinsic: Any = extending.intrinsic

_I64 = ir.IntType(64)
usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))


@intrinsic
def call_dots(typingctx, function, a, packed, c, m, n, k, a_stride, c_stride):
    """NumKong's `nk_dots_packed_*(a, packed, c, m, n, k, a_stride, c_stride)` at address `function`."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 8)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


@intrinsic
def call_op(typingctx, function, op, rows, items, begin, end, parts, thread):
    """The function of an op at address `function`, as `jit.entry` makes it."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 7)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@intrinsic
def atomic_load(typingctx, pointer, index):
    """Acquiring load of pointer[index]."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "acquire", 8)

    return types.int64(pointer, types.int64), codegen


@intrinsic
def atomic_store(typingctx, pointer, index, value):
    """Sequentially consistent store to pointer[index]."""

    def codegen(context, builder, signature, args):
        builder.atomic_rmw("xchg", builder.gep(args[0], [args[1]]), args[2], "seq_cst")
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.int64), codegen


@intrinsic
def compare_and_swap(typingctx, pointer, index, expected, value):
    """Store `value` to pointer[index] if that is `expected`, sequentially consistent; what was there."""

    def codegen(context, builder, signature, args):
        place = builder.gep(args[0], [args[1]])
        pair = builder.cmpxchg(place, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(pointer, types.int64, types.int64, types.int64), codegen
