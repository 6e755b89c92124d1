"""Products of int8: rounding what is multiplied, products with bias and residual, and gates and ups in one go."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from engine.devices.cpu.kernels.constants import GROUP, LANES, PART_BLOCKS, SPAN, STRIP_ROWS
from engine.devices.cpu.kernels.gated import gated
from engine.devices.cpu.kernels.jit import entry, inner
from engine.devices.cpu.kernels.matmul_int8 import int8_panel
from engine.devices.cpu.kernels.panels import run_of
from engine.devices.cpu.kernels.quantize import quantize_group, quantize_row
from engine.devices.cpu.kernels.simd import f32_pointer, i64_pointer, pad


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
        packed, columns, block, blocks, column, begin = run_of(op, begin, end, PART_BLOCKS)
        bias, out = op[8] + column * 4 if op[8] != 0 else 0, op[2] + column * 4
        weight = packed + block * groups * GROUP * LANES
        scales = packed + pad(columns) * groups * GROUP + block * spans * 2 * LANES
        int8_panel(op[1], op[10], weight, scales, groups, out, out_stride, rows, blocks, bias, op[9])


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
        packed, columns, block, blocks, column, begin = run_of(op, begin, end, 2 * PART_BLOCKS)
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
    a, b, c = gated(x, 0, GROUP), gated(x, LANES, GROUP), gated(x, 2 * LANES, GROUP)
    quantize_group(a, b, c, width, group, target)


@entry
def quantize_parts(address, rows, items, begin, end, parts, thread):
    quantize(i64_pointer(address), rows * begin // parts, rows * end // parts)


@entry
def linear_int8_parts(address, rows, items, begin, end, parts, thread):
    linear_int8(i64_pointer(address), rows, begin, end)


@entry
def gate_up_int8_parts(address, rows, items, begin, end, parts, thread):
    gate_up_int8(i64_pointer(address), rows, begin, end, thread)
