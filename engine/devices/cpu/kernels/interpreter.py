"""The interpreter: into how many parts an op's work is cut, and who does them.

A program is an int64 table, one row per op: its code, the operands that the op's function documents, that function's
address. The table holds addresses of buffers that never move, so a step changes only the number of rows, like a CUDA
graph's replay. Functions are called by address, so that each is compiled by itself (`jit.py`).
Read next: `engine/devices/cpu/program.py`, which writes tables; `engine/devices/cpu/kernels/teamwork.py`, which has
threads run them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from engine.devices.cpu.kernels.constants import (
    ATTENTION_BFLOAT16,
    ATTENTION_FLOAT32,
    COLUMNS,
    GATE_UP_INT8,
    LINEAR,
    LINEAR_INT8,
)
from engine.devices.cpu.kernels.jit import inner
from engine.devices.cpu.kernels.native import call_op

_MOST_UNITS = 4096
_MOST_ROW_PARTS = 8
"""Of an op that is cheap per row: more would only cost atomics."""


@inner
def parts_of(op, rows, items):
    """Into how many parts an op's work is cut; it must not depend on the number of threads."""
    if op[0] == LINEAR or op[0] == LINEAR_INT8 or op[0] == GATE_UP_INT8:
        return op[6] * op[7]
    if op[0] == ATTENTION_BFLOAT16 or op[0] == ATTENTION_FLOAT32:
        return min(items * op[8], _MOST_UNITS)
    return min(rows, _MOST_ROW_PARTS)


@inner
def do_parts(op, address, rows, items, begin, end, parts, thread):
    """Do parts [begin, end) of the op at `address`; `thread` says whose scratch memory to use."""
    call_op(op[COLUMNS - 1], address, rows, items, begin, end, parts, thread)
