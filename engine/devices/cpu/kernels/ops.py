"""Every op of the cpu device but attention and its cache: some of its work.

Each function takes its row of the program's table, whose columns are those that the recorder's method of the same name
writes (`engine/devices/cpu/program.py`). Matrices are row-major with rows padded to 16 lanes; pad lanes are always
zero. What is to be done is rows [begin, end), or parts of the columns where one row must feed them all: the split never
changes a value. Read next: `engine/devices/cpu/kernels/rope.py`, `engine/devices/cpu/kernels/interpreter.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import numpy as np

from engine.devices.cpu.kernels.bits import bfloat_to_float, f64_from_bits, half_to_float
from engine.devices.cpu.kernels.constants import GROUP, LANES
from engine.devices.cpu.kernels.jit import entry, inner
from engine.devices.cpu.kernels.quantize import quantize_group
from engine.devices.cpu.kernels.simd import (
    f32_pointer,
    fma,
    i32_pointer,
    i64_pointer,
    load,
    pad,
    reduce_add,
    splat,
    store,
    store_narrow,
    u16_pointer,
)


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


@entry
def embedding_parts(address, rows, items, begin, end, parts, thread):
    embedding(i64_pointer(address), rows * begin // parts, rows * end // parts)


@entry
def select_rows_parts(address, rows, items, begin, end, parts, thread):
    select_rows(i64_pointer(address), rows * begin // parts, rows * end // parts)


@entry
def rms_norm_parts(address, rows, items, begin, end, parts, thread):
    rms_norm(i64_pointer(address), rows * begin // parts, rows * end // parts)
