"""Paged attention on AVX512-BF16: flash attention over blocks of 64 keys, products in pairs of bfloat16.

A page holds, per kv head, keys as [head_dim / 2, slots, 2] and values as [slots / 2, head_dim, 2] bfloat16, so that
a vector is 16 keys x 2 inputs of a score, or 16 outputs x 2 keys, and neither product sums across lanes. int8 pages
(keys [head_dim, slots], values [slots, head_dim]) are widened, which is exact, and their scales multiply scores
and weights.

    unit  = up to 48 query rows (tokens x query heads) of one sequence that share a kv head
    tile  = 16 slots of a page, in the order of positions
    block = 4 tiles that follow each other, the first one's number divisible by 4
    strip = 6 or 3 query rows, whose sums of a block stay in registers

A row sees the same blocks in the same order with the same arithmetic in a prefill chunk of any size and in a decode
step; a block that is masked for a whole row multiplies its sums by exactly 1 and adds exactly 0.
Keys beyond a row's own are masked by selection, never by adding -inf, and values beyond the unit's last position
are never read: what an unused slot holds cannot matter, not even a NaN.
Algorithm: Dao, FlashAttention-2 (2023). Read next: `engine/devices/cpu/kernels/attention_float32.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import math
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types

from engine.devices.cpu.kernels.attention import reset, write
from engine.devices.cpu.kernels.codegen import ZERO, Address, broadcast, dot_pairs, intrinsic, open_loop, prefetch
from engine.devices.cpu.kernels.constants import LANES
from engine.devices.cpu.kernels.jit import entry, inner
from engine.devices.cpu.kernels.simd import (
    exp2,
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
    store_narrow,
    store_pairs,
    u16_pointer,
)

TILES = 4
KEYS = TILES * LANES
STRIP = 6

_LOG2_E = np.float32(1 / math.log(2))

_F32 = ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(ir.IntType(32), LANES)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


def _load_addresses(builder: Any, table: Any, first: int) -> list[Address]:
    """Four addresses from a table of int64."""
    places = [Address(builder, table).at((ir.Constant(_I64, 8), first + t)) for t in range(TILES)]
    return [Address(builder, place.load(_I64, 8)) for place in places]


def _make_score(rows: int) -> Any:
    """An intrinsic that computes the scores of `rows` query rows and a block of keys."""

    @intrinsic
    def score(typingctx, q, q_stride, tiles, k_stride, pairs, out):
        """out[rows, 64] = q . k. tiles: addresses of a block's keys, then of its values; strides in bytes.

        The values, which are read next, are fetched meanwhile, into the second cache, whose misses overlap: 16 rows
        decode with 600 tokens behind them in 8 ms, fetching into the first in 11.
        """

        def codegen(context, builder, signature, args):
            q, q_stride, tiles, k_stride, pairs, out = args
            keys, values = (_load_addresses(builder, tiles, first) for first in (0, TILES))
            sums, k, close = open_loop(builder, pairs, [ZERO] * (rows * TILES))
            line = builder.mul(k, k_stride)
            vectors = [tile.at((line, 1)).load(_PAIRS, 64) for tile in keys]
            for tile in values:
                prefetch(builder, tile.at((k, 64)).address, level=2)
            grown = []
            for i in range(rows):
                pair = broadcast(builder, Address(builder, q).at((q_stride, i), (k, 4)).load(_I32, 4))
                grown += [dot_pairs(builder, sums[i * TILES + t], pair, vectors[t]) for t in range(TILES)]
            close(grown)
            for i, total in enumerate(sums):
                Address(builder, out).at((ir.Constant(_I64, 64), i)).store(total)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return score


def _make_accumulate(rows: int, vectors: int) -> Any:
    """An intrinsic that adds weighted values to `rows` x `vectors` * 16 outputs."""

    @intrinsic
    def accumulate(typingctx, weights, factors, tiles, count, padded, first, out):
        """out[rows, first : first + vectors * 16] = out * factors[rows, 16] + weights[rows, 64] . v.

        tiles: addresses of `count` tiles' values, then of the next block's keys, which are fetched meanwhile.
        """

        def codegen(context, builder, signature, args):
            weights, factors, tiles, count, padded, first, out = args
            places = [
                Address(builder, out).at((padded, 4 * i), (first, 4), (ir.Constant(_I64, 64), j))
                for i in range(rows)
                for j in range(vectors)
            ]
            scales = [Address(builder, factors).at((ir.Constant(_I64, 64), i)).load(_F32, 4) for i in range(rows)]
            start = [builder.fmul(place.load(_F32, 4), scales[i // vectors]) for i, place in enumerate(places)]
            totals, tile, close = open_loop(builder, count, start)
            sums = totals
            values, following = (
                Address(builder, Address(builder, tiles).at((tile, 8), (ir.Constant(_I64, 8), n)).load(_I64, 8))
                for n in (0, TILES)
            )
            for pair in range(LANES // 2):
                line = values.at((padded, 4 * pair), (first, 4))
                loaded = [line.at((ir.Constant(_I64, 64), j)).load(_PAIRS, 64) for j in range(vectors)]
                for j in range(vectors):
                    ahead = following.at((padded, 4 * pair), (first, 4), (ir.Constant(_I64, 64), j))
                    prefetch(builder, ahead.address, level=2)
                grown = []
                for i in range(rows):
                    at = Address(builder, weights).at((tile, 32), (ir.Constant(_I64, 1), 128 * i + 4 * pair))
                    weight = broadcast(builder, at.load(_I32, 4))
                    grown += [dot_pairs(builder, sums[i * vectors + j], weight, loaded[j]) for j in range(vectors)]
                sums = grown
            close(sums)
            for place, total in zip(places, totals, strict=True):
                place.store(total)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return accumulate


_score6, _score3 = _make_score(6), _make_score(3)
_accumulate6x4, _accumulate6x1 = _make_accumulate(6, 4), _make_accumulate(6, 1)
_accumulate3x4, _accumulate3x1 = _make_accumulate(3, 4), _make_accumulate(3, 1)


@inner
def attend_bfloat16(op, item, kv_head, thread):
    """One unit; op as in `engine/devices/cpu/kernels/attention.py`, pages 1 bfloat16 or 3 int8, queries bfloat16."""
    items = i32_pointer(op[6])
    tokens, start = np.int64(items[4 * item + 1]), np.int64(items[4 * item + 3])
    padded, block_size, window = pad(op[9]), op[10], op[13]
    group = op[7] // op[8]
    count = tokens * group
    rows = (count + 2) // 3 * 3
    room = op[14] + thread * op[15]
    tiles = room + 2 * 2 * KEYS * padded
    scales = tiles + 8 * 4 * TILES
    scores = scales + 4 * 2 * KEYS
    weights = scores + 4 * STRIP * KEYS
    factors = weights + 2 * STRIP * KEYS
    state = factors + 4 * STRIP * LANES
    out = state + 4 * 2 * rows * LANES
    q = out + 4 * rows * padded
    _gather_queries(op, item, kv_head, group, rows, u16_pointer(q))
    reset(f32_pointer(out), f32_pointer(state), rows, padded)
    last = start + tokens - 1
    first = max(0, start - window + 1) if window > 0 else np.int64(0)
    last_tile = _tile_of(last, block_size)
    for block in range(_tile_of(first, block_size) // TILES, last_tile // TILES + 1):
        key_stride = _locate(op, item, kv_head, block, last, last_tile, i64_pointer(tiles), room, f32_pointer(scales))
        newest_key = _first_key(TILES * block + TILES, block_size) - 1
        oldest_key = _first_key(TILES * block, block_size)
        row = np.int64(0)
        while row < rows:
            strip = np.int64(6 if rows - row >= 6 else 3)
            oldest, newest = start + row // group, start + min(row + strip - 1, count - 1) // group
            if newest < oldest_key or (window > 0 and oldest - window + 1 > newest_key):
                row += strip
                continue
            source, target = q + 2 * row * padded, out + 4 * row * padded
            if strip == 6:
                _score6(source, 2 * padded, tiles, key_stride, padded // 2, scores)
            else:
                _score3(source, 2 * padded, tiles, key_stride, padded // 2, scores)
            whole = (
                newest_key <= oldest and block_size % LANES == 0 and (window == 0 or newest - window + 1 <= oldest_key)
            )
            _soften(op, scores, weights, factors, scales, state, row, strip, rows, start, group, block, whole)
            used = min(np.int64(TILES), _tile_of(newest, block_size) - TILES * block + 1)
            for at in range(0, padded - padded % 64, 64):
                if strip == 6:
                    _accumulate6x4(weights, factors, tiles + 8 * TILES, used, padded, at, target)
                else:
                    _accumulate3x4(weights, factors, tiles + 8 * TILES, used, padded, at, target)
            for at in range(padded - padded % 64, padded, LANES):
                if strip == 6:
                    _accumulate6x1(weights, factors, tiles + 8 * TILES, used, padded, at, target)
                else:
                    _accumulate3x1(weights, factors, tiles + 8 * TILES, used, padded, at, target)
            row += strip
    if op[16] == 1:
        write(op, item, kv_head, group, count, rows, f32_pointer(out), f32_pointer(state), u16_pointer(op[2]))
    else:
        write(op, item, kv_head, group, count, rows, f32_pointer(out), f32_pointer(state), f32_pointer(op[2]))


@inner
def _tile_of(position, block_size):
    """Number of the tile that holds a position."""
    return position // block_size * (pad(block_size) // LANES) + position % block_size // LANES


@inner
def _first_key(tile, block_size):
    """Position of a tile's first slot."""
    per_page = pad(block_size) // LANES
    return tile // per_page * block_size + tile % per_page * LANES


@inner
def _locate(op, item, kv_head, block, last, last_tile, tiles, room, scales):
    """Fill `tiles`: addresses of the block's keys, values and of the next block's keys; stride between key lines.

    Tiles beyond the last repeat it. int8 is widened into `room`, as are values of which some must not be read.
    """
    itemsize = 1 if op[12] == 3 else 2
    padded, block_size = pad(op[9]), op[10]
    lanes, per_page = pad(block_size), pad(block_size) // LANES
    table, items = i32_pointer(op[5]), i32_pointer(op[6])
    entries = np.int64(items[4 * item + 2]) * op[11]
    for t in range(2 * TILES):
        tile = min(block * TILES + t, last_tile)
        page = np.int64(table[entries + tile // per_page]) * op[19] + kv_head * op[20]
        slot = tile % per_page * LANES
        k = op[3] + page + (slot if op[12] == 3 else 4 * slot)
        if t >= TILES:
            tiles[TILES + t] = k
            continue
        v = op[4] + page + itemsize * slot * padded
        key = _first_key(block * TILES + t, block_size)
        used = max(np.int64(0), min(min(block_size - slot, np.int64(LANES)), last + 1 - key))
        k_room, v_room = room + 2 * t * LANES * padded, room + 2 * (TILES + t) * LANES * padded
        if op[12] == 3:
            _widen(k, v, lanes, padded, used, u16_pointer(k_room), u16_pointer(v_room))
            zero, at = splat(np.float32(0.0)), page // 4 + slot
            store(scales, t * LANES, keep_lanes(load(f32_pointer(op[17]), at), 0, used, zero))
            store(scales, KEYS + t * LANES, keep_lanes(load(f32_pointer(op[18]), at), 0, used, zero))
            k, v = k_room, v_room
        elif used < LANES:
            _copy_values(i32_pointer(v), used, padded, i32_pointer(v_room))
            v = v_room
        tiles[t], tiles[TILES + t] = k, v
    return np.int64(4 * LANES) if op[12] == 3 else 4 * lanes


@inner
def _widen(keys, values, lanes, padded, used, wide_keys, wide_values):
    """A tile of int8 as pairs of bfloat16: all keys, and `used` values with zeros behind them."""
    k, v, zero = i8_pointer(keys), i8_pointer(values), splat(np.float32(0.0))
    for i in range(0, padded, 2):
        store_pairs(wide_keys, i * LANES, load(k, i * lanes), load(k, (i + 1) * lanes))
    for j in range(0, LANES, 2):
        for i in range(0, padded, LANES):
            even = load(v, j * padded + i) if j < used else zero
            odd = load(v, (j + 1) * padded + i) if j + 1 < used else zero
            store_pairs(wide_values, j * padded + 2 * i, even, odd)


@inner
def _copy_values(values, used, padded, copy):
    """Pairs of the `used` first values of a tile, with zeros behind them."""
    for j in range(0, LANES, 2):
        for i in range(padded):
            pair = np.int32(0)
            if j + 1 < used:
                pair = values[j // 2 * padded + i]
            elif j < used:
                pair = np.int32(values[j // 2 * padded + i] & 0xFFFF)
            copy[j // 2 * padded + i] = pair


@inner
def _gather_queries(op, item, kv_head, group, rows, q):
    """Query rows token by token, the group's heads side by side; rows beyond the last are zero."""
    queries, items, padded = u16_pointer(op[1]), i32_pointer(op[6]), pad(op[9])
    first, count = np.int64(items[4 * item]), np.int64(items[4 * item + 1]) * group
    for r in range(rows):
        source = ((first + r // group) * op[7] + kv_head * group + r % group) * padded
        for i in range(padded):
            q[r * padded + i] = queries[source + i] if r < count else np.uint16(0)


@inner
def _soften(op, scores, weights, factors, scales, state, row, strip, rows, start, group, block, whole):
    """Scores [strip, 64] to softmax weights against the new maximum, bfloat16; factors [strip, 16] for older sums."""
    s, w, f, st = f32_pointer(scores), u16_pointer(weights), f32_pointer(factors), f32_pointer(state)
    log2_e, masked = splat(_LOG2_E), splat(np.float32(-np.inf))
    zero, sc = splat(np.float32(0.0)), f32_pointer(scales)
    for i in range(strip):
        at, r = i * KEYS, row + i
        a, b = load(s, at), load(s, at + LANES)
        c, d = load(s, at + 2 * LANES), load(s, at + 3 * LANES)
        if op[12] == 3:
            a, b = a * load(sc, 0), b * load(sc, LANES)
            c, d = c * load(sc, 2 * LANES), d * load(sc, 3 * LANES)
        if not whole:
            position = start + r // group
            a = _mask(op, a, position, TILES * block, masked)
            b = _mask(op, b, position, TILES * block + 1, masked)
            c = _mask(op, c, position, TILES * block + 2, masked)
            d = _mask(op, d, position, TILES * block + 3, masked)
        old = load(st, r * LANES)
        new = maximum(old, splat(reduce_max(maximum(maximum(a, b), maximum(c, d)))))
        factor, shift = exp2((old - new) * log2_e), zero - new * log2_e
        a, b = exp2(fma(a, log2_e, shift)), exp2(fma(b, log2_e, shift))
        c, d = exp2(fma(c, log2_e, shift)), exp2(fma(d, log2_e, shift))
        total = (rows + r) * LANES
        store(st, total, fma(load(st, total), factor, (a + b) + (c + d)))
        store(st, r * LANES, new)
        store(f, i * LANES, factor)
        if op[12] == 3:
            a, b = a * load(sc, KEYS), b * load(sc, KEYS + LANES)
            c, d = c * load(sc, KEYS + 2 * LANES), d * load(sc, KEYS + 3 * LANES)
        store_narrow(w, at, a)
        store_narrow(w, at + LANES, b)
        store_narrow(w, at + 2 * LANES, c)
        store_narrow(w, at + 3 * LANES, d)


@inner
def _mask(op, scores, position, tile, masked):
    """The scores of a tile's keys that the query at `position` sees; of the rest, `masked`."""
    block_size, window = op[10], op[13]
    key = _first_key(tile, block_size)
    slots = min(np.int64(LANES), block_size - tile % (pad(block_size) // LANES) * LANES)
    begin = position - window + 1 - key if window > 0 else np.int64(0)
    return keep_lanes(scores, begin, min(position + 1 - key, slots), masked)


@entry
def attention_bfloat16_parts(address, rows, items, begin, end, parts, thread):
    op = i64_pointer(address)
    units = items * op[8]
    for part in range(begin, end):
        for unit in range(units - 1 - part, -1, -parts):
            attend_bfloat16(op, unit % items, unit // items, thread)
