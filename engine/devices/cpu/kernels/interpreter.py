"""The interpreter: replays a program, op by op, as one thread of a team.

A program is an int64 table, one row per op: code, then the columns that the op's kernel documents. Threads meet
at a barrier after every op. The table holds addresses of buffers that never move, so a step changes
only the number of rows, like a CUDA graph's replay. Read next: `engine/devices/cpu/program.py`, which writes tables.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from engine.devices.cpu.kernels.attention import attention
from engine.devices.cpu.kernels.constants import (
    ATTENTION,
    EMBEDDING,
    LINEAR,
    LINEAR_INT8,
    QUANTIZE,
    RMS_NORM,
    ROPE_AND_CACHE,
    SELECT_ROWS,
    SILU_AND_MUL,
)
from engine.devices.cpu.kernels.jit import kernel
from engine.devices.cpu.kernels.native import barrier
from engine.devices.cpu.kernels.ops import (
    embedding,
    linear,
    linear_int8,
    quantize,
    rms_norm,
    select_rows,
    silu_and_mul,
)
from engine.devices.cpu.kernels.rope import rope_and_cache
from engine.devices.cpu.kernels.simd import i64_pointer


@kernel
def interpret(table, rows, items, sync_address, thread, threads):
    """Run `table` [ops, columns] int64 over `rows` rows and `items` attention items.

    sync: int64 [1 + ops], zero before the run: the barrier, and the work counter of each op.
    """
    sync = i64_pointer(sync_address)
    for i in range(len(table)):
        op = table[i]
        code = op[0]
        if code == LINEAR:
            linear(op, rows, thread, threads)
        elif code == LINEAR_INT8:
            linear_int8(op, rows, thread, threads)
        elif code == QUANTIZE:
            quantize(op, rows, thread, threads)
        elif code == RMS_NORM:
            rms_norm(op, rows, thread, threads)
        elif code == ATTENTION:
            attention(op, items, sync, i + 1, thread)
        elif code == ROPE_AND_CACHE:
            rope_and_cache(op, rows, thread, threads)
        elif code == SILU_AND_MUL:
            silu_and_mul(op, rows, thread, threads)
        elif code == EMBEDDING:
            embedding(op, rows, thread, threads)
        elif code == SELECT_ROWS:
            select_rows(op, rows, thread, threads)
        barrier(sync, threads, i)
