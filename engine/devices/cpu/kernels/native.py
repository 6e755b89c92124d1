"""What Numba code needs from outside Python: a call by address, atomics, a barrier, giving up the time slice.

Addresses are plain int64 arguments, never compiled-in constants, so that the on-disk cache of compiled code stays
valid from one process to the next. Read next: `engine/devices/cpu/kernels/interpreter.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import extending, types

from engine.devices.cpu.kernels.jit import inner

intrinsic: Any = extending.intrinsic

_I64 = ir.IntType(64)
_SPINS = 4_000
"""Loads before a waiting thread starts to yield, 2 us: most waits are shorter."""
_YIELDS = 200
"""Yields before it sleeps. A waiting thread must leave its processor in the end, so that the one it waits for can
move there if something else has taken its own: beside one busy process a decode step of SmolLM2 takes 26 ms,
220 ms when waiting threads only yield, and 36 ms when they don't yield first; 14 ms undisturbed."""
_SLEEP_MICROSECONDS = 20

sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
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
def atomic_add(typingctx, pointer, index, value):
    """Sequentially consistent fetch-and-add on pointer[index]; the value before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "seq_cst")

    return types.int64(pointer, types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, pointer, index):
    """Acquiring load of pointer[index]."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "acquire", 8)

    return types.int64(pointer, types.int64), codegen


@inner
def barrier(sync, threads, passed):
    """Wait until all threads have arrived; `sync[0]` counts arrivals, `passed` earlier barriers of this run."""
    target = threads * (passed + 1)
    if atomic_add(sync, 0, 1) + 1 == target:
        return
    waited = 0
    while atomic_load(sync, 0) < target:
        waited += 1
        if waited >= _SPINS + _YIELDS:
            usleep(np.uint32(_SLEEP_MICROSECONDS))
        elif waited >= _SPINS:
            sched_yield()
