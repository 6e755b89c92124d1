"""Products of float32 and bfloat16, by our own kernel or NumKong's, with bias and residual."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import numpy as np

from engine.devices.cpu.kernels.constants import LANES, PART_BLOCKS, ROW_TILE
from engine.devices.cpu.kernels.jit import entry, inner
from engine.devices.cpu.kernels.matmul import bfloat16_panel
from engine.devices.cpu.kernels.native import call_dots
from engine.devices.cpu.kernels.panels import run_of
from engine.devices.cpu.kernels.simd import (
    f32_pointer,
    f64_pointer,
    i64_pointer,
    keep_lanes,
    load,
    pad,
    splat,
    store,
)


@inner
def linear(op, rows, begin, end, thread):
    """op: x, out, k, n, panels, number of panels, parts of a panel, bias or 0, adds to out, x is bfloat16, dots,
    scratch, its stride.

    panels: [number, 3] int64 of packed address, first column, columns. Without dots, the weight is packed for
    `bfloat16_panel`, which needs no scratch; with them a part is a panel.
    """
    if op[11] == 0:
        _linear_bfloat16(op, rows, begin, end)
        return
    panels = i64_pointer(op[5])
    x_stride = pad(op[3]) * (2 if op[10] == 1 else 4)
    c_size = 4 if op[10] == 1 else 8
    scratch = op[12] + thread * op[13]
    for panel in range(begin, end):
        packed, first, columns = panels[3 * panel], panels[3 * panel + 1], panels[3 * panel + 2]
        for row in range(0, rows, ROW_TILE):
            m = min(ROW_TILE, rows - row)
            a = op[1] + row * x_stride
            call_dots(op[11], a, packed, scratch, m, columns, op[3], x_stride, pad(columns) * c_size)
            if op[10] == 1:
                _finish_panel(op, f32_pointer(scratch), row, m, first, columns)
            else:
                _finish_panel(op, f64_pointer(scratch), row, m, first, columns)


@inner
def _linear_bfloat16(op, rows, begin, end):
    pairs, out_stride = (op[3] + 1) // 2, pad(op[4]) * 4
    while begin < end:
        packed, _, block, blocks, column, begin = run_of(op, begin, end, PART_BLOCKS)
        bias, out = op[8] + column * 4 if op[8] != 0 else 0, op[2] + column * 4
        weight = packed + block * pairs * 64
        bfloat16_panel(op[1], pad(op[3]) * 2, weight, pairs * 64, out, out_stride, rows, blocks, pairs, bias, op[9])


@inner
def _finish_panel(op, c, row, m, first, columns):
    """Move a product from scratch to its place, with bias and residual."""
    out, bias = f32_pointer(op[2]), f32_pointer(op[8])
    zero = splat(np.float32(0.0))
    for i in range(m):
        target = (row + i) * pad(op[4]) + first
        for column in range(0, columns, LANES):
            value = load(c, i * pad(columns) + column)
            if op[8] != 0:
                value = value + load(bias, first + column)
            if column + LANES > columns:
                value = keep_lanes(value, 0, columns - column, zero)
            if op[9] == 1:
                value = value + load(out, target + column)
            store(out, target + column, value)


@entry
def linear_parts(address, rows, items, begin, end, parts, thread):
    linear(i64_pointer(address), rows, begin, end, thread)
