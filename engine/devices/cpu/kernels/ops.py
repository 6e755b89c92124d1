"""Every op of the cpu device but attention and its cache: some of its work.

Each function takes its row of the program's table, whose columns are those that the recorder's method of the same name
writes (`engine/devices/cpu/program.py`). Matrices are row-major with rows padded to 16 lanes; pad lanes are always
zero. What is to be done is rows [begin, end), or parts of the columns where one row must feed them all: the split never
changes a value. Read next: `engine/devices/cpu/kernels/rope.py`, `engine/devices/cpu/kernels/interpreter.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import math

import numpy as np

from engine.devices.cpu.kernels.constants import GROUP, LANES, PART_BLOCKS, ROW_TILE, SPAN, STRIP_ROWS
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
def embedding(op, begin, end):
    """op: ids (int32), weight, weight dtype code (0 float32, 1 bfloat16, 2 float16), out, width."""
    ids, out, width = i32_pointer(op[1]), f32_pointer(op[4]), op[5]
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
def select_rows(op, begin, end):
    """op: indices (int32), x, out, width."""
    indices, x, out, stride = i32_pointer(op[1]), f32_pointer(op[2]), f32_pointer(op[3]), pad(op[4])
    for row in range(begin, end):
        for i in range(0, stride, LANES):
            store(out, row * stride + i, load(x, indices[row] * stride + i))


@inner
def rms_norm(op, begin, end):
    """op: x, weight, out, width, eps (float64 bits), out's code (0 float32, 1 bfloat16, 2 int8 groups), its stride.

    The residual stream is float32 and the result rounded once; Transformers rounds to bfloat16 before the weight, too.
    """
    x, weight, stride = f32_pointer(op[1]), f32_pointer(op[2]), pad(op[4])
    for row in range(begin, end):
        first = row * stride
        scale = _norm_scale(x, first, stride, op[4], f64_from_bits(op[5]))
        if op[6] == 2:
            target = op[3] + row * op[7]
            for i in range(0, stride, GROUP):
                a = _normed(x, weight, first, i, stride, scale)
                b = _normed(x, weight, first, i + LANES, stride, scale)
                c = _normed(x, weight, first, i + 2 * LANES, stride, scale)
                quantize_group(a, b, c, op[4], i // GROUP, target)
        elif op[6] == 1:
            out = u16_pointer(op[3])
            for i in range(0, stride, LANES):
                store_narrow(out, first + i, load(x, first + i) * scale * load(weight, i))
        else:
            single = f32_pointer(op[3])
            for i in range(0, stride, LANES):
                store(single, first + i, load(x, first + i) * scale * load(weight, i))


@inner
def _normed(x, weight, first, i, stride, scale):
    return load(x, first + i) * scale * load(weight, i) if i < stride else splat(np.float32(0.0))


@inner
def _norm_scale(x, first, stride, width, eps):
    """1 / sqrt(mean of squares + eps); two sums, because one would wait for itself."""
    even = odd = splat(np.float32(0.0))
    pairs = stride // (2 * LANES) * (2 * LANES)
    for i in range(0, pairs, 2 * LANES):
        a, b = load(x, first + i), load(x, first + i + LANES)
        even, odd = fma(a, a, even), fma(b, b, odd)
    if pairs < stride:
        last = load(x, first + pairs)
        even = fma(last, last, even)
    mean = np.float64(reduce_add(even + odd)) / width
    return splat(np.float32(1.0 / np.sqrt(mean + eps)))


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
def _run_of(op, begin, end, part_blocks):
    """What of parts [begin, end) lies in one panel: its address, columns, first and number of 16-column blocks to do,
    first column, the part that follows."""
    panels, panel, part = i64_pointer(op[5]), begin // op[7], begin % op[7]
    packed, column, columns = panels[3 * panel], panels[3 * panel + 1], panels[3 * panel + 2]
    following = min(end, (panel + 1) * op[7])
    block = part * part_blocks
    blocks = min((following - begin) * part_blocks, pad(columns) // LANES - block)
    return packed, columns, block, blocks, column + block * LANES, following


@inner
def _linear_bfloat16(op, rows, begin, end):
    pairs, out_stride = (op[3] + 1) // 2, pad(op[4]) * 4
    while begin < end:
        packed, _, block, blocks, column, begin = _run_of(op, begin, end, PART_BLOCKS)
        bias, out = op[8] + column * 4 if op[8] != 0 else 0, op[2] + column * 4
        weight = packed + block * pairs * 64
        bfloat16_panel(op[1], pad(op[3]) * 2, weight, pairs * 64, out, out_stride, rows, blocks, pairs, bias, op[9])


@inner
def quantize(op, begin, end):
    """op: x, out, width, out's stride in bytes. x is float32, out rows are as in `matmul_int8`."""
    for row in range(begin, end):
        quantize_row(op[1] + row * pad(op[3]) * 4, op[3], op[2] + row * op[4])


@inner
def linear_int8(op, rows, begin, end):
    """op: x as `quantize` makes it, out, k, n, panels, number of panels, parts of a panel, bias or 0, adds to out, x's
    stride in bytes.

    panels: as in `linear`; a panel's scales lie behind its weights.
    """
    groups, out_stride = (op[3] + GROUP - 1) // GROUP, pad(op[4]) * 4
    spans = (groups + SPAN - 1) // SPAN
    while begin < end:
        packed, columns, block, blocks, column, begin = _run_of(op, begin, end, PART_BLOCKS)
        bias, out = op[8] + column * 4 if op[8] != 0 else 0, op[2] + column * 4
        weight = packed + block * groups * GROUP * LANES
        scales = packed + pad(columns) * groups * GROUP + block * spans * 2 * LANES
        int8_panel(op[1], op[10], weight, scales, groups, out, out_stride, rows, blocks, bias, op[9])


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


@inner
def gate_up_int8(op, rows, begin, end, thread):
    """op: x as `quantize` makes it, out the same, k, width, panels, number of panels, parts of a panel, x's stride and
    out's in bytes, scratch, its stride.

    out = silu(x . gates) * (x . ups), rounded. A part is 48 gates and their ups, a group of out, kept near the thread
    until they are multiplied: 512 rows of SmolLM2 have 6 MB of them in a layer.
    """
    groups, room, out_stride = (op[3] + GROUP - 1) // GROUP, op[10] + thread * op[11], 2 * GROUP * 4
    spans = (groups + SPAN - 1) // SPAN
    while begin < end:
        packed, columns, block, blocks, column, begin = _run_of(op, begin, end, 2 * PART_BLOCKS)
        for at in range(0, blocks, 2 * PART_BLOCKS):
            weight = packed + (block + at) * groups * GROUP * LANES
            scales = packed + columns * groups * GROUP + (block + at) * spans * 2 * LANES
            group = column // (2 * GROUP) + at // (2 * PART_BLOCKS)
            for row in range(0, rows, STRIP_ROWS):
                strip, x = min(STRIP_ROWS, rows - row), op[1] + row * op[8]
                int8_panel(x, op[8], weight, scales, groups, room, out_stride, strip, 2 * PART_BLOCKS, 0, 0)
                for i in range(strip):
                    _round_gated(f32_pointer(room + i * out_stride), op[4], group, op[2] + (row + i) * op[9])


@inner
def _round_gated(x, width, group, target):
    """48 gates and their ups to group `group` of an int8 row; both are zero beyond the width."""
    a, b, c = _gated(x, 0, GROUP), _gated(x, LANES, GROUP), _gated(x, 2 * LANES, GROUP)
    quantize_group(a, b, c, width, group, target)


@inner
def _gated(x, gate, distance):
    """silu(gate) * up to 4e-6, for results that are rounded."""
    g = load(x, gate)
    return g / (splat(np.float32(1.0)) + exp2(g * splat(_MINUS_LOG2_E))) * load(x, gate + distance)


@inner
def silu_and_mul(op, begin, end):
    """op: gate_up, out, width, out's code as in `rms_norm`, its stride. gate_up rows hold `width` gates, then ups."""
    x, width, stride = f32_pointer(op[1]), op[3], pad(2 * op[3])
    for row in range(begin, end):
        gates = row * stride
        if op[4] == 2:
            for i in range(0, width, GROUP):
                a, b = _silu(x, gates, i, width), _silu(x, gates, i + LANES, width)
                c = _silu(x, gates, i + 2 * LANES, width)
                quantize_group(a, b, c, width, i // GROUP, op[2] + row * op[5])
        elif op[4] == 1:
            for i in range(0, width, LANES):
                store_narrow(u16_pointer(op[2]), row * pad(width) + i, _silu(x, gates, i, width))
        else:
            _silu_float32(x, gates, f32_pointer(op[2]), row * pad(width), width)


@inner
def _silu(x, gates, i, width):
    """Vector i of silu(gate) * up of a row whose gates begin at `gates`; zero beyond the width."""
    if i >= width:
        return splat(np.float32(0.0))
    value = _gated(x, gates + i, width)
    return value if i + LANES <= width else keep_lanes(value, 0, width - i, splat(np.float32(0.0)))


@inner
def _silu_float32(x, gates, out, target, width):
    one, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
    for i in range(0, width, LANES):
        gate = load(x, gates + i)
        value = gate / (one + exp(zero - gate)) * load(x, gates + width + i)
        store(out, target + i, keep_lanes(value, 0, width - i, zero))
