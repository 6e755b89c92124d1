"""The interpreter: what an op of a program is, and into how many parts its work is cut.

A program is an int64 table, one row per op: code, then the columns that the op's kernel documents. The table holds
addresses of buffers that never move, so a step changes only the number of rows, like a CUDA graph's replay.
Read next: `engine/devices/cpu/program.py`, which writes tables; `engine/devices/cpu/kernels/teamwork.py`, which has
threads run them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from engine.devices.cpu.kernels.attention import attention
from engine.devices.cpu.kernels.constants import (
    ATTENTION,
    EMBEDDING,
    GATE_UP_INT8,
    LINEAR,
    LINEAR_INT8,
    QUANTIZE,
    RMS_NORM,
    ROPE_AND_CACHE,
    SELECT_ROWS,
    SILU_AND_MUL,
)
from engine.devices.cpu.kernels.jit import inner
from engine.devices.cpu.kernels.ops import (
    embedding,
    gate_up_int8,
    linear,
    linear_int8,
    quantize,
    rms_norm,
    select_rows,
    silu_and_mul,
)
from engine.devices.cpu.kernels.rope import rope_and_cache

_MOST_UNITS = 4096
_MOST_ROW_PARTS = 8
"""Of an op that is cheap per row: more would only cost atomics."""


@inner
def parts_of(op, rows, items):
    """Into how many parts an op's work is cut; it must not depend on the number of threads."""
    if op[0] == LINEAR or op[0] == LINEAR_INT8 or op[0] == GATE_UP_INT8:
        return op[6] * op[7]
    if op[0] == ATTENTION:
        return min(items * op[8], _MOST_UNITS)
    return min(rows, _MOST_ROW_PARTS)


@inner
def do_parts(op, rows, items, begin, end, parts, thread):
    """Do parts [begin, end); `thread` says whose scratch memory to use."""
    code, first, last = op[0], rows * begin // parts, rows * end // parts
    if code == LINEAR:
        linear(op, rows, begin, end, thread)
    elif code == LINEAR_INT8:
        linear_int8(op, rows, begin, end)
    elif code == GATE_UP_INT8:
        gate_up_int8(op, rows, begin, end, thread)
    elif code == QUANTIZE:
        quantize(op, first, last)
    elif code == RMS_NORM:
        rms_norm(op, first, last)
    elif code == ATTENTION:
        attention(op, items, begin, end, parts, thread)
    elif code == ROPE_AND_CACHE:
        rope_and_cache(op, first, last)
    elif code == SILU_AND_MUL:
        silu_and_mul(op, first, last)
    elif code == EMBEDDING:
        embedding(op, first, last)
    elif code == SELECT_ROWS:
        select_rows(op, first, last)
