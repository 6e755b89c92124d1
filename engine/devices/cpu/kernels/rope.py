"""Rotary embedding of queries and keys, and writing keys and values to their pages.

Layouts of pages: `KVLayout` in `engine/devices/cpu/layout.py`. Read next: `engine/devices/cpu/kernels/attention.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import numpy as np

from engine.devices.cpu.kernels.bits import f64_from_bits
from engine.devices.cpu.kernels.constants import LANES
from engine.devices.cpu.kernels.jit import entry, inner
from engine.devices.cpu.kernels.simd import (
    f32_pointer,
    fma,
    i8_pointer,
    i32_pointer,
    i64_pointer,
    load,
    pad,
    put,
    reduce_add,
    splat,
    store,
    store_narrow,
    u16_pointer,
)

SMALLEST_NORMAL = np.float32(2.0**-126)


@inner
def rope_and_cache(op, begin, end):
    """op: qkv, queries, keys pages, values pages, cosines and sines (0: no rotation), block table, token rows, token
    positions, heads, kv heads, head_dim, block_size, blocks per row, pages (0 float32, 1 bfloat16, 2 and 3 the same
    rounded to int8), attention scale (float64 bits), scales of keys and of values, bytes from a block to the next and
    from a head to the next, weights of the heads' norms (queries', then keys'; 0 for none), eps (float64 bits).
    Queries are bfloat16 where pages are odd."""
    qkv, table, token_rows, positions = f32_pointer(op[1]), i32_pointer(op[6]), i32_pointer(op[7]), i32_pointer(op[8])
    heads, kv_heads, size, block_size = op[9], op[10], op[11], op[12]
    scale, stride = np.float32(f64_from_bits(op[15])), pad((heads + 2 * kv_heads) * size)
    for token in range(begin, end):
        position = np.int64(positions[token])
        block = np.int64(table[token_rows[token] * op[13] + position // block_size])
        x = token * stride
        for head in range(heads + kv_heads):
            if op[20] != 0:
                weight = op[20] if head < heads else op[20] + 4 * size
                _normalise(qkv, x + head * size, weight, size, f64_from_bits(op[21]))
            _rotate(qkv, x + head * size, op[5], position, size, scale if head < heads else np.float32(1.0))
        _copy_queries(op, qkv, x, token)
        for head in range(kv_heads):
            page, key = block * op[18] + head * op[19], x + (heads + head) * size
            _cache(op, qkv, key, key + kv_heads * size, page, position % block_size)


@inner
def _normalise(x, first, weights, size, eps):
    """One head, in place: x / sqrt(mean of squares + eps) * weight."""
    weight, sums, whole = f32_pointer(weights), splat(np.float32(0.0)), size - size % LANES
    for i in range(0, whole, LANES):
        value = load(x, first + i)
        sums = fma(value, value, sums)
    total = np.float64(reduce_add(sums))
    for i in range(whole, size):
        total += np.float64(x[first + i]) * np.float64(x[first + i])
    scale = np.float32(1.0 / np.sqrt(total / size + eps))
    factor = splat(scale)
    for i in range(0, whole, LANES):
        store(x, first + i, load(x, first + i) * factor * load(weight, i))
    for i in range(whole, size):
        x[first + i] = x[first + i] * scale * weight[i]


@inner
def _rotate(x, first, angles, position, size, scale):
    """Half-split rotary embedding of one head, in place, times `scale`; without `angles`, the scale alone."""
    if angles == 0:
        for i in range(size):
            x[first + i] *= scale
        return
    half = size // 2
    table, cosines = f32_pointer(angles), position * size
    sines, factor = cosines + half, splat(scale)
    whole = half - half % LANES
    for i in range(0, whole, LANES):
        cosine, sine = load(table, cosines + i), load(table, sines + i)
        a, b = load(x, first + i), load(x, first + half + i)
        store(x, first + i, (a * cosine - b * sine) * factor)
        store(x, first + half + i, (b * cosine + a * sine) * factor)
    for i in range(whole, half):
        c, s = table[cosines + i], table[sines + i]
        e, f = x[first + i], x[first + half + i]
        x[first + i] = (e * c - f * s) * scale
        x[first + half + i] = (f * c + e * s) * scale


@inner
def _round(x, first, size, out, target):
    """out[target : target + size padded] = the head x[first : first + size] as bfloat16; may overwrite x in place."""
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        store_narrow(out, target + i, load(x, first + i))
    for i in range(whole, size):
        put(out, target + i, x[first + i])


@inner
def _copy_queries(op, x, first, token):
    heads, size, padded = op[9], op[11], pad(op[11])
    for head in range(heads):
        source, target = first + head * size, (token * heads + head) * padded
        if op[14] % 2 == 1:
            _round(x, source, size, u16_pointer(op[2]), target)
        else:
            queries = f32_pointer(op[2])
            for i in range(size):
                queries[target + i] = x[source + i]
        for i in range(size, padded):
            if op[14] % 2 == 1:
                u16_pointer(op[2])[target + i] = np.uint16(0)
            else:
                f32_pointer(op[2])[target + i] = np.float32(0.0)


@inner
def _cache(op, qkv, key, value, page, slot):
    """Write one head's key and value to their slot of the page that begins `page` bytes behind the first."""
    size, padded, lanes = op[11], pad(op[11]), pad(op[12])
    if op[14] >= 2:
        key_scales, value_scales, at = f32_pointer(op[16]), f32_pointer(op[17]), page + slot * padded
        key_scales[page // 4 + slot] = _quantize(qkv, key, size, padded, i8_pointer(op[3]), page + slot, lanes)
        value_scales[page // 4 + slot] = _quantize(qkv, value, size, padded, i8_pointer(op[4]), at, 1)
    elif op[14] == 1:
        _cache_pairs(op, qkv, key, value, page // 4 + slot, page // 2 + slot // 2 * 2 * padded + slot % 2)
    else:
        keys, values, first = f32_pointer(op[3]), f32_pointer(op[4]), page // 4
        for i in range(padded):
            inside = i < size
            keys[first + slot + i * lanes] = qkv[key + i] if inside else np.float32(0.0)
            values[first + slot * padded + i] = qkv[value + i] if inside else np.float32(0.0)


@inner
def _cache_pairs(op, qkv, key, value, k, v):
    """Keys as pairs of inputs from pair `k` on, values from element `v` on, both first rounded where they lie."""
    size, padded, lanes, rounded = op[11], pad(op[11]), pad(op[12]), u16_pointer(op[1])
    _round(qkv, key, size, rounded, 2 * key)
    _round(qkv, value, size, rounded, 2 * value)
    keys, pairs, values = i32_pointer(op[3]), i32_pointer(op[1]), u16_pointer(op[4])
    for i in range(size // 2):
        keys[k + i * lanes] = pairs[key + i]
    for i in range(size):
        values[v + 2 * i] = rounded[2 * value + i]
    for i in range(size // 2, padded // 2):
        keys[k + i * lanes] = np.int32(0)
    for i in range(size, padded):
        values[v + 2 * i] = np.uint16(0)


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


@entry
def rope_and_cache_parts(address, rows, items, begin, end, parts, thread):
    rope_and_cache(i64_pointer(address), rows * begin // parts, rows * end // parts)
