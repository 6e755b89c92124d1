"""Paged attention in float32: online softmax over tiles of 16 keys, read in place from the pages.

A page holds, per kv head, keys as [head_dim, slots] and values as [slots, head_dim]: scores of 16 keys are one
vector that a loop over head_dim accumulates, outputs are vectors over head_dim that a loop over keys accumulates.
Neither needs a sum across lanes, so the order of every sum is fixed by the position of the keys alone.

    unit  = up to 48 query rows (tokens x query heads) of one sequence that share a kv head
    tile  = 16 slots of a page, in the order of positions
    block = 4 query rows, whose accumulators stay in registers

A row sees the same tiles in the same order with the same arithmetic in a prefill chunk of any size and in a decode
step; a tile that is masked for a whole row multiplies its sums by exactly 1 and adds exactly 0.
Keys beyond a row's own are masked by selection, never by adding -inf, and values beyond the unit's last position
are never read: what an unused slot holds cannot matter, not even a NaN.
Read next: `engine/devices/cpu/kernels/rope.py`, which writes the pages.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import numpy as np

from engine.devices.cpu.kernels.attention import reset, write
from engine.devices.cpu.kernels.constants import LANES
from engine.devices.cpu.kernels.jit import entry, inner
from engine.devices.cpu.kernels.simd import (
    exp,
    f32_pointer,
    fma,
    i8_pointer,
    i32_pointer,
    i64_pointer,
    keep_lanes,
    load,
    maximum,
    pad,
    reduce_max,
    splat,
    store,
)

BLOCK = 4


@inner
def attend_float32(op, item, kv_head, thread):
    """One unit; op as in `engine/devices/cpu/kernels/attention.py`, pages 0 float32 or 2 int8, queries float32."""
    tile = op[14] + thread * op[15]
    room = (f32_pointer(tile), f32_pointer(tile + 4 * LANES * pad(op[9])))
    if op[12] == 2:
        _attend(op, item, kv_head, (i8_pointer(op[3]), i8_pointer(op[4])), room, thread)
    else:
        pages = (f32_pointer(op[3]), f32_pointer(op[4]))
        _attend(op, item, kv_head, pages, pages, thread)


@inner
def _attend(op, item, kv_head, pages, tiles, thread):
    """pages: keys and values; tiles: the same, or room for a tile of both in which int8 is dequantized first."""
    items, table = i32_pointer(op[6]), i32_pointer(op[5])
    tokens, row, start = np.int64(items[4 * item + 1]), np.int64(items[4 * item + 2]), np.int64(items[4 * item + 3])
    kv_heads, padded, block_size, window = op[8], pad(op[9]), op[10], op[13]
    group = op[7] // kv_heads
    count = tokens * group
    rows = (count + BLOCK - 1) // BLOCK * BLOCK
    scratch = op[14] + thread * op[15] + 8 * LANES * padded
    q = f32_pointer(scratch)
    out = f32_pointer(scratch + 4 * rows * padded)
    state = f32_pointer(scratch + 8 * rows * padded)
    weights = f32_pointer(scratch + 8 * rows * padded + 8 * rows * LANES)
    _gather_queries(op, item, kv_head, group, rows, q)
    reset(out, state, rows, padded)
    lanes, itemsize = pad(block_size), 1 if op[12] == 2 else 4
    last = start + tokens - 1
    first = max(0, start - window + 1) if window > 0 else np.int64(0)
    for page_start in range(first // block_size * block_size, last + 1, block_size):
        page = np.int64(table[row * op[11] + page_start // block_size]) * op[19] + kv_head * op[20]
        for slot in range(0, block_size, LANES):
            key = page_start + slot
            if key > last:
                break
            slots = min(block_size - slot, np.int64(LANES))
            if key + slots <= first:
                continue
            k, v = page // itemsize + slot, page // itemsize + slot * padded
            used, stride = min(slots, last + 1 - key), lanes
            if op[12] == 2:
                _dequantize(op, pages, k, v, page // 4 + slot, used, lanes, padded, tiles)
                k, v, stride = np.int64(0), np.int64(0), np.int64(LANES)
            for block in range(0, rows, BLOCK):
                newest = start + min(block + BLOCK - 1, count - 1) // group
                oldest = start + block // group
                if newest < key or (window > 0 and oldest - window + 1 >= key + slots):
                    continue
                _score(q, tiles[0], k, stride, padded, block, weights)
                _soften(weights, state, rows, block, start, group, count, window, key, slots)
                _accumulate(out, tiles[1], v, used, padded, block, weights)
    write(op, item, kv_head, group, count, rows, out, state, f32_pointer(op[2]))


@inner
def _dequantize(op, pages, k, v, scales, used, lanes, padded, tiles):
    """A tile times its scales: keys [padded, 16], values [used, padded]."""
    scale = load(f32_pointer(op[17]), scales)
    for i in range(padded):
        store(tiles[0], i * LANES, load(pages[0], k + i * lanes) * scale)
    value_scales = f32_pointer(op[18])
    for j in range(used):
        scale = splat(value_scales[scales + j])
        for i in range(0, padded, LANES):
            store(tiles[1], j * padded + i, load(pages[1], v + j * padded + i) * scale)


@inner
def _gather_queries(op, item, kv_head, group, rows, q):
    """Query rows token by token, the group's heads side by side; rows beyond the last are zero."""
    queries, items, padded = f32_pointer(op[1]), i32_pointer(op[6]), pad(op[9])
    first, count = np.int64(items[4 * item]), np.int64(items[4 * item + 1]) * group
    for r in range(rows):
        source = ((first + r // group) * op[7] + kv_head * group + r % group) * padded
        for i in range(0, padded, LANES):
            store(q, r * padded + i, load(queries, source + i) if r < count else splat(np.float32(0.0)))


@inner
def _score(q, keys, k, lanes, padded, block, weights):
    """weights[4, 16] = q[block : block + 4] . keys of the tile."""
    s0 = s1 = s2 = s3 = splat(np.float32(0.0))
    q0, q1, q2, q3 = block * padded, (block + 1) * padded, (block + 2) * padded, (block + 3) * padded
    for i in range(padded):
        key = load(keys, k + i * lanes)
        s0 = fma(splat(q[q0 + i]), key, s0)
        s1 = fma(splat(q[q1 + i]), key, s1)
        s2 = fma(splat(q[q2 + i]), key, s2)
        s3 = fma(splat(q[q3 + i]), key, s3)
    store(weights, 0, s0)
    store(weights, LANES, s1)
    store(weights, 2 * LANES, s2)
    store(weights, 3 * LANES, s3)


@inner
def _soften(weights, state, rows, block, start, group, count, window, key, slots):
    """Scores to softmax weights against the new maximum; weights[4 + i] becomes row i's factor for older sums."""
    masked = splat(np.float32(-np.inf))
    for i in range(BLOCK):
        r = block + i
        position = start + r // group
        end = min(position + 1 - key, slots) if r < count else np.int64(0)
        begin = position - window + 1 - key if window > 0 else np.int64(0)
        scores = keep_lanes(load(weights, i * LANES), begin, end, masked)
        old = load(state, r * LANES)
        new = maximum(old, splat(reduce_max(scores)))
        factor, shares = exp(old - new), exp(scores - new)
        store(weights, i * LANES, shares)
        store(weights, (BLOCK + i) * LANES, factor)
        store(state, r * LANES, new)
        store(state, (rows + r) * LANES, fma(load(state, (rows + r) * LANES), factor, shares))


@inner
def _accumulate(out, values, v, slots, padded, block, weights):
    """out[block : block + 4] = out * factor + weights . values of the tile."""
    o0, o1, o2, o3 = block * padded, (block + 1) * padded, (block + 2) * padded, (block + 3) * padded
    f0, f1 = load(weights, BLOCK * LANES), load(weights, (BLOCK + 1) * LANES)
    f2, f3 = load(weights, (BLOCK + 2) * LANES), load(weights, (BLOCK + 3) * LANES)
    for i in range(0, padded, LANES):
        a0, a1 = load(out, o0 + i) * f0, load(out, o1 + i) * f1
        a2, a3 = load(out, o2 + i) * f2, load(out, o3 + i) * f3
        for j in range(slots):
            value = load(values, v + j * padded + i)
            a0 = fma(splat(weights[j]), value, a0)
            a1 = fma(splat(weights[LANES + j]), value, a1)
            a2 = fma(splat(weights[2 * LANES + j]), value, a2)
            a3 = fma(splat(weights[3 * LANES + j]), value, a3)
        store(out, o0 + i, a0)
        store(out, o1 + i, a1)
        store(out, o2 + i, a2)
        store(out, o3 + i, a3)


@entry
def attention_float32_parts(address, rows, items, begin, end, parts, thread):
    op = i64_pointer(address)
    units = items * op[8]
    for part in range(begin, end):
        for unit in range(units - 1 - part, -1, -parts):
            attend_float32(op, unit % items, unit // items, thread)
