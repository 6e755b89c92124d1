"""Every op of the cpu device but attention: what one thread of a team does of it.

Each function takes its row of the program's table, whose columns are the fields of the dataclass of the same name in
`engine/devices/cpu/program.py`. Matrices are row-major with rows padded to 16 lanes; pad lanes are
always zero. Threads split rows, or columns where one row must feed them all; the split never changes a
value. Read next: `engine/devices/cpu/kernels/attention.py`, `engine/devices/cpu/kernels/interpreter.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import numpy as np

from engine.devices.cpu.kernels.constants import GROUP, LANES, ROW_TILE
from engine.devices.cpu.kernels.jit import inner
from engine.devices.cpu.kernels.matmul import bfloat16_panel
from engine.devices.cpu.kernels.matmul_int8 import int8_panel, quantize_row
from engine.devices.cpu.kernels.native import call_dots
from engine.devices.cpu.kernels.simd import (
    bfloat_to_float,
    exp,
    f32_pointer,
    f64_from_bits,
    f64_pointer,
    half_to_float,
    i8_pointer,
    i32_pointer,
    i64_pointer,
    keep_lanes,
    load,
    put,
    reduce_add,
    splat,
    store,
    u16_pointer,
)

SMALLEST_NORMAL = np.float32(2.0**-126)


@inner
def pad(width):
    """`width` rounded up to whole vectors."""
    return (width + LANES - 1) // LANES * LANES


@inner
def share(count, thread, threads):
    """This thread's part [begin, end) of `count` units."""
    return count * thread // threads, count * (thread + 1) // threads


@inner
def embedding(op, rows, thread, threads):
    """op: ids (int32), weight, weight dtype code (0 float32, 1 bfloat16, 2 float16), out, width."""
    ids, out, width = i32_pointer(op[1]), f32_pointer(op[4]), op[5]
    begin, end = share(rows, thread, threads)
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
def select_rows(op, rows, thread, threads):
    """op: indices (int32), x, out, width."""
    indices, x, out, stride = i32_pointer(op[1]), f32_pointer(op[2]), f32_pointer(op[3]), pad(op[4])
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        for i in range(0, stride, LANES):
            store(out, row * stride + i, load(x, indices[row] * stride + i))


@inner
def rms_norm(op, rows, thread, threads):
    """op: x, weight, out, width, eps (float64 bits), out is bfloat16."""
    if op[6] == 1:
        _rms_norm(op, u16_pointer(op[3]), rows, thread, threads)
    else:
        _rms_norm(op, f32_pointer(op[3]), rows, thread, threads)


@inner
def _rms_norm(op, out, rows, thread, threads):
    x, weight, width = f32_pointer(op[1]), f32_pointer(op[2]), op[4]
    eps, stride = f64_from_bits(op[5]), pad(op[4])
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        squares = splat(np.float32(0.0))
        for i in range(0, stride, LANES):
            v = load(x, row * stride + i)
            squares = squares + v * v
        mean = np.float64(reduce_add(squares)) / width
        scale = splat(np.float32(1.0 / np.sqrt(mean + eps)))
        for i in range(0, stride, LANES):
            store(out, row * stride + i, load(x, row * stride + i) * scale * load(weight, i))


@inner
def linear(op, rows, thread, threads):
    """op: x, out, k, n, panels, number of panels, bias or 0, adds to out, x is bfloat16, dots, scratch, its stride.

    panels: [number, 3] int64 of packed address, first column, columns. Without dots, the weight is packed for
    `bfloat16_panel`, which needs no scratch.
    """
    if op[10] == 0:
        _linear_bfloat16(op, rows, thread, threads)
        return
    panels = i64_pointer(op[5])
    x_stride = pad(op[3]) * (2 if op[9] == 1 else 4)
    c_size = 4 if op[9] == 1 else 8
    scratch = op[11] + thread * op[12]
    begin, end = share(op[6], thread, threads)
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
def _linear_bfloat16(op, rows, thread, threads):
    panels = i64_pointer(op[5])
    pairs, out_stride = (op[3] + 1) // 2, pad(op[4]) * 4
    begin, end = share(op[6], thread, threads)
    for panel in range(begin, end):
        packed, first, columns = panels[3 * panel], panels[3 * panel + 1], panels[3 * panel + 2]
        blocks, bias = pad(columns) // LANES, op[7] + first * 4 if op[7] != 0 else 0
        out = op[2] + first * 4
        bfloat16_panel(op[1], pad(op[3]) * 2, packed, pairs * 64, out, out_stride, rows, blocks, pairs, bias, op[8])


@inner
def quantize(op, rows, thread, threads):
    """op: x, out, width, out's stride in bytes. x is float32, out rows are as in `matmul_int8`."""
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        quantize_row(op[1] + row * pad(op[3]) * 4, op[3], op[2] + row * op[4])


@inner
def linear_int8(op, rows, thread, threads):
    """op: x as `quantize` makes it, out, k, n, panels, number of panels, bias or 0, adds to out, x's stride in bytes.

    panels: as in `linear`; a panel's scales lie behind its weights.
    """
    panels, groups, out_stride = i64_pointer(op[5]), (op[3] + GROUP - 1) // GROUP, pad(op[4]) * 4
    begin, end = share(op[6], thread, threads)
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
def silu_and_mul(op, rows, thread, threads):
    """op: gate_up, out, width, out is bfloat16. gate_up rows hold `width` gates, then `width` ups."""
    if op[4] == 1:
        _silu_and_mul(op, u16_pointer(op[2]), rows, thread, threads)
    else:
        _silu_and_mul(op, f32_pointer(op[2]), rows, thread, threads)


@inner
def _silu_and_mul(op, out, rows, thread, threads):
    x, width = f32_pointer(op[1]), op[3]
    one, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
    vectors, stride = pad(width) // LANES, pad(2 * width)
    begin, end = share(rows * vectors, thread, threads)
    for vector in range(begin, end):
        row, i = vector // vectors, vector % vectors * LANES
        gate, up = load(x, row * stride + i), load(x, row * stride + width + i)
        value = gate / (one + exp(zero - gate)) * up
        if i + LANES > width:
            value = keep_lanes(value, 0, width - i, zero)
        store(out, row * pad(width) + i, value)


@inner
def rope_and_cache(op, rows, thread, threads):
    """op: qkv, queries, keys pages, values pages, cosines and sines, block table, token rows, token positions,
    heads, kv heads, head_dim, block_size, blocks per row, pages (0 float32, 1 bfloat16, 2 and 3 the same rounded to
    int8), attention scale (float64 bits), scales of keys and of values. Queries are bfloat16 where pages are odd."""
    qkv, table, token_rows, positions = f32_pointer(op[1]), i32_pointer(op[6]), i32_pointer(op[7]), i32_pointer(op[8])
    heads, kv_heads, size, block_size = op[9], op[10], op[11], op[12]
    scale, stride, padded = np.float32(f64_from_bits(op[15])), pad((heads + 2 * kv_heads) * size), pad(size)
    begin, end = share(rows, thread, threads)
    for token in range(begin, end):
        position = np.int64(positions[token])
        block = np.int64(table[token_rows[token] * op[13] + position // block_size])
        x = token * stride
        for head in range(heads + kv_heads):
            _rotate(qkv, x + head * size, op[5], position, size, scale if head < heads else np.float32(1.0))
        if op[14] % 2 == 1:
            _copy_queries(qkv, x, heads, size, u16_pointer(op[2]), token * heads * padded)
        else:
            _copy_queries(qkv, x, heads, size, f32_pointer(op[2]), token * heads * padded)
        for head in range(kv_heads):
            page, slot = block * kv_heads + head, position % block_size
            _cache(op, qkv, x + (heads + head) * size, x + (heads + kv_heads + head) * size, page, slot)


@inner
def _copy_queries(qkv, x, heads, size, queries, target):
    for head in range(heads):
        for i in range(pad(size)):
            put(queries, target + head * pad(size) + i, qkv[x + head * size + i] if i < size else np.float32(0.0))


@inner
def _cache(op, qkv, key, value, page, slot):
    """Write one head's key and value to their slot: layouts in `KVLayout`."""
    size, padded, block_size, lanes = op[11], pad(op[11]), op[12], pad(op[12])
    k, v = page * padded * lanes, page * (block_size + block_size % 2) * padded
    if op[14] >= 2:
        key_scales, value_scales = f32_pointer(op[16]), f32_pointer(op[17])
        at = v + slot * padded
        key_scales[page * lanes + slot] = _quantize(qkv, key, size, padded, i8_pointer(op[3]), k + slot, lanes)
        value_scales[page * lanes + slot] = _quantize(qkv, value, size, padded, i8_pointer(op[4]), at, 1)
    elif op[14] == 1:
        keys, values = u16_pointer(op[3]), u16_pointer(op[4])
        for i in range(padded):
            inside = i < size
            at = k + (i // 2 * lanes + slot) * 2 + i % 2
            put(keys, at, qkv[key + i] if inside else np.float32(0.0))
            at = v + (slot // 2 * padded + i) * 2 + slot % 2
            put(values, at, qkv[value + i] if inside else np.float32(0.0))
    else:
        single_keys, single_values = f32_pointer(op[3]), f32_pointer(op[4])
        for i in range(padded):
            inside = i < size
            single_keys[k + slot + i * lanes] = qkv[key + i] if inside else np.float32(0.0)
            single_values[v + slot * padded + i] = qkv[value + i] if inside else np.float32(0.0)


@inner
def _quantize(x, source, size, padded, out, target, step):
    """One head as int8; its scale, absmax / 127. Element i goes to out[target + i * step], zeros up to `padded`.

    The scale is 0, and so are all elements, where it would not be a normal number; NaN if there is one.
    """
    top = np.float32(0.0)
    for i in range(size):
        value = abs(x[source + i])
        if value > top or value != value:
            top = value
    scale = np.float32(top / np.float32(127.0))
    if scale < SMALLEST_NORMAL:
        scale = np.float32(0.0)
    for i in range(padded):
        value = x[source + i] / scale if i < size and scale != np.float32(0.0) else np.float32(0.0)
        put(out, target + i * step, value)
    return scale


@inner
def _rotate(x, first, angles, position, size, scale):
    """Half-split rotary embedding of one head, in place, times `scale`."""
    half = size // 2
    table = f32_pointer(angles)
    cosines = position * size
    sines = cosines + half
    for i in range(half):
        cosine, sine = table[cosines + i], table[sines + i]
        a, b = x[first + i], x[first + half + i]
        x[first + i] = (a * cosine - b * sine) * scale
        x[first + half + i] = (b * cosine + a * sine) * scale
