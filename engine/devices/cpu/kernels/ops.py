"""Every op of the cpu device but attention and its cache: one part of `parts` of its work.

Each function takes its row of the program's table, whose columns are the fields of the dataclass of the same name in
`engine/devices/cpu/program.py`. Matrices are row-major with rows padded to 16 lanes; pad lanes are
always zero. Parts are of rows, or of columns where one row must feed them all; the split never changes a
value. Read next: `engine/devices/cpu/kernels/rope.py`, `engine/devices/cpu/kernels/interpreter.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import math

import numpy as np

from engine.devices.cpu.kernels.constants import GROUP, LANES, ROW_TILE
from engine.devices.cpu.kernels.jit import inner
from engine.devices.cpu.kernels.matmul import bfloat16_panel
from engine.devices.cpu.kernels.matmul_int8 import int8_panel, quantize_group, quantize_row
from engine.devices.cpu.kernels.native import call_dots
from engine.devices.cpu.kernels.simd import (
    bfloat_to_float,
    exp,
    exp2,
    f32_pointer,
    f64_from_bits,
    f64_pointer,
    fma,
    half_to_float,
    i32_pointer,
    i64_pointer,
    keep_lanes,
    load,
    reduce_add,
    splat,
    store,
    store_narrow,
    u16_pointer,
)

_MINUS_LOG2_E = np.float32(-1 / math.log(2))


@inner
def pad(width):
    """`width` rounded up to whole vectors."""
    return (width + LANES - 1) // LANES * LANES


@inner
def share(count, part, parts):
    """Part [begin, end) of `count` units."""
    return count * part // parts, count * (part + 1) // parts


@inner
def embedding(op, rows, part, parts):
    """op: ids (int32), weight, weight dtype code (0 float32, 1 bfloat16, 2 float16), out, width."""
    ids, out, width = i32_pointer(op[1]), f32_pointer(op[4]), op[5]
    begin, end = share(rows, part, parts)
    for row in range(begin, end):
        source, target = ids[row] * width, row * pad(width)
        if op[3] == 0:
            single = f32_pointer(op[2])
            for i in range(width):
                out[target + i] = single[source + i]
        elif op[3] == 1:
            bfloat = u16_pointer(op[2])
            for i in range(width):
                out[target + i] = bfloat_to_float(bfloat[source + i])
        else:
            half = u16_pointer(op[2])
            for i in range(width):
                out[target + i] = half_to_float(half[source + i])
        for i in range(width, pad(width)):
            out[target + i] = np.float32(0.0)


@inner
def select_rows(op, rows, part, parts):
    """op: indices (int32), x, out, width."""
    indices, x, out, stride = i32_pointer(op[1]), f32_pointer(op[2]), f32_pointer(op[3]), pad(op[4])
    begin, end = share(rows, part, parts)
    for row in range(begin, end):
        for i in range(0, stride, LANES):
            store(out, row * stride + i, load(x, indices[row] * stride + i))


@inner
def rms_norm(op, rows, part, parts):
    """op: x, weight, out, width, eps (float64 bits), out's code (0 float32, 1 bfloat16, 2 int8 groups), its stride."""
    x, weight, stride = f32_pointer(op[1]), f32_pointer(op[2]), pad(op[4])
    begin, end = share(rows, part, parts)
    for row in range(begin, end):
        first = row * stride
        scale = _norm_scale(x, first, stride, op[4], f64_from_bits(op[5]))
        if op[6] == 2:
            target = op[3] + row * op[7]
            for i in range(0, stride, GROUP):
                a, b = load(x, first + i) * scale * load(weight, i), splat(np.float32(0.0))
                if i + LANES < stride:
                    b = load(x, first + i + LANES) * scale * load(weight, i + LANES)
                quantize_group(a, b, op[4], i // GROUP, target)
        elif op[6] == 1:
            out = u16_pointer(op[3])
            for i in range(0, stride, LANES):
                store_narrow(out, first + i, load(x, first + i) * scale * load(weight, i))
        else:
            single = f32_pointer(op[3])
            for i in range(0, stride, LANES):
                store(single, first + i, load(x, first + i) * scale * load(weight, i))


@inner
def _norm_scale(x, first, stride, width, eps):
    """1 / sqrt(mean of squares + eps); two sums, because one would wait for itself."""
    even = odd = splat(np.float32(0.0))
    for i in range(0, stride - stride % GROUP, GROUP):
        a, b = load(x, first + i), load(x, first + i + LANES)
        even, odd = fma(a, a, even), fma(b, b, odd)
    if stride % GROUP != 0:
        last = load(x, first + stride - LANES)
        even = fma(last, last, even)
    mean = np.float64(reduce_add(even + odd)) / width
    return splat(np.float32(1.0 / np.sqrt(mean + eps)))


@inner
def linear(op, rows, part, parts, thread):
    """op: x, out, k, n, panels, number of panels, bias or 0, adds to out, x is bfloat16, dots, scratch, its stride.

    panels: [number, 3] int64 of packed address, first column, columns. Without dots, the weight is packed for
    `bfloat16_panel`, which needs no scratch.
    """
    if op[10] == 0:
        _linear_bfloat16(op, rows, part, parts)
        return
    panels = i64_pointer(op[5])
    x_stride = pad(op[3]) * (2 if op[9] == 1 else 4)
    c_size = 4 if op[9] == 1 else 8
    scratch = op[11] + thread * op[12]
    begin, end = share(op[6], part, parts)
    for panel in range(begin, end):
        packed, first, columns = panels[3 * panel], panels[3 * panel + 1], panels[3 * panel + 2]
        for row in range(0, rows, ROW_TILE):
            m = min(ROW_TILE, rows - row)
            a = op[1] + row * x_stride
            call_dots(op[10], a, packed, scratch, m, columns, op[3], x_stride, pad(columns) * c_size)
            if op[9] == 1:
                _finish_panel(op, f32_pointer(scratch), row, m, first, columns)
            else:
                _finish_panel(op, f64_pointer(scratch), row, m, first, columns)


@inner
def _linear_bfloat16(op, rows, part, parts):
    panels = i64_pointer(op[5])
    pairs, out_stride = (op[3] + 1) // 2, pad(op[4]) * 4
    begin, end = share(op[6], part, parts)
    for panel in range(begin, end):
        packed, first, columns = panels[3 * panel], panels[3 * panel + 1], panels[3 * panel + 2]
        blocks, bias = pad(columns) // LANES, op[7] + first * 4 if op[7] != 0 else 0
        out = op[2] + first * 4
        bfloat16_panel(op[1], pad(op[3]) * 2, packed, pairs * 64, out, out_stride, rows, blocks, pairs, bias, op[8])


@inner
def quantize(op, rows, part, parts):
    """op: x, out, width, out's stride in bytes. x is float32, out rows are as in `matmul_int8`."""
    begin, end = share(rows, part, parts)
    for row in range(begin, end):
        quantize_row(op[1] + row * pad(op[3]) * 4, op[3], op[2] + row * op[4])


@inner
def linear_int8(op, rows, part, parts):
    """op: x as `quantize` makes it, out, k, n, panels, number of panels, bias or 0, adds to out, x's stride in bytes.

    panels: as in `linear`; a panel's scales lie behind its weights.
    """
    panels, groups, out_stride = i64_pointer(op[5]), (op[3] + GROUP - 1) // GROUP, pad(op[4]) * 4
    begin, end = share(op[6], part, parts)
    for panel in range(begin, end):
        packed, first, columns = panels[3 * panel], panels[3 * panel + 1], panels[3 * panel + 2]
        blocks, bias = pad(columns) // LANES, op[7] + first * 4 if op[7] != 0 else 0
        scales = packed + pad(columns) * groups * GROUP
        int8_panel(op[1], op[9], packed, scales, groups, op[2] + first * 4, out_stride, rows, blocks, bias, op[8])


@inner
def _finish_panel(op, c, row, m, first, columns):
    """Move a product from scratch to its place, with bias and residual."""
    out, bias = f32_pointer(op[2]), f32_pointer(op[7])
    zero = splat(np.float32(0.0))
    for i in range(m):
        target = (row + i) * pad(op[4]) + first
        for column in range(0, columns, LANES):
            value = load(c, i * pad(columns) + column)
            if op[7] != 0:
                value = value + load(bias, first + column)
            if column + LANES > columns:
                value = keep_lanes(value, 0, columns - column, zero)
            if op[8] == 1:
                value = value + load(out, target + column)
            store(out, target + column, value)


@inner
def silu_and_mul(op, rows, part, parts):
    """op: gate_up, out, width, out's code as in `rms_norm`, its stride. gate_up rows hold `width` gates, then ups."""
    x, width, stride = f32_pointer(op[1]), op[3], pad(2 * op[3])
    groups = (width + GROUP - 1) // GROUP
    begin, end = share(rows * groups, part, parts)
    row, g = begin // groups, begin % groups
    for _ in range(begin, end):
        gates, ups, i = row * stride + g * GROUP, row * stride + width + g * GROUP, g * GROUP
        if op[4] == 0:
            _silu_float32(x, gates, ups, f32_pointer(op[2]), row * pad(width), i, width)
        else:
            a, b = _silu(x, gates, ups, i, width), splat(np.float32(0.0))
            if i + LANES < width:
                b = _silu(x, gates + LANES, ups + LANES, i + LANES, width)
            if op[4] == 2:
                quantize_group(a, b, width, g, op[2] + row * op[5])
            else:
                out = u16_pointer(op[2])
                store_narrow(out, row * pad(width) + i, a)
                if i + LANES < width:
                    store_narrow(out, row * pad(width) + i + LANES, b)
        g += 1
        if g == groups:
            row, g = row + 1, 0


@inner
def _silu(x, gates, ups, i, width):
    """silu(gate) * up to 4e-6: for results that are rounded."""
    gate = load(x, gates)
    value = gate / (splat(np.float32(1.0)) + exp2(gate * splat(_MINUS_LOG2_E))) * load(x, ups)
    return value if i + LANES <= width else keep_lanes(value, 0, width - i, splat(np.float32(0.0)))


@inner
def _silu_float32(x, gates, ups, out, target, i, width):
    one, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
    for at in range(0, min(GROUP, width - i), LANES):
        gate = load(x, gates + at)
        value = gate / (one + exp(zero - gate)) * load(x, ups + at)
        store(out, target + i + at, keep_lanes(value, 0, width - i - at, zero))
