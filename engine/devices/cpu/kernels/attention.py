"""Paged attention: the op's columns, and what its two kinds share.

    op      queries, out, keys pages, values pages, block table, items, heads, kv heads, head_dim, block_size, blocks
            per row, pages (0 float32, 1 bfloat16, 2 and 3 the same rounded to int8), window or 0, scratch, its stride
            per thread, out is bfloat16, scales of keys and of values, bytes from a block to the next and from a head
            to the next. Queries are bfloat16 where pages are odd.
    items   [items, 4] int32 of first token, tokens, row, position of the first token

A unit is an item and a kv head. A part is every `parts`-th unit; the first part begins with the last unit, the longest.
Units of a kv head follow each other: a head's pages of 1,000 tokens, where rows share them, stay in a thread's second
cache. Read next: `engine/devices/cpu/kernels/attention_bfloat16.py`, `engine/devices/cpu/kernels/attention_float32.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import numpy as np

from engine.devices.cpu.kernels.constants import LANES
from engine.devices.cpu.kernels.jit import inner
from engine.devices.cpu.kernels.simd import i32_pointer, load, pad, put, reduce_add, splat, store

_LOWEST = np.float32(-1e30)
"""Start of the running maximum: finite, so that a row with no key yet computes exp(-inf), never inf - inf."""


@inner
def reset(out, state, rows, padded):
    """state: [2, rows, 16], running maximum (all lanes equal) and per-lane sum of weights."""
    zero = splat(np.float32(0.0))
    for i in range(0, rows * padded, LANES):
        store(out, i, zero)
    for r in range(rows):
        store(state, r * LANES, splat(_LOWEST))
        store(state, (rows + r) * LANES, zero)


@inner
def write(op, item, kv_head, group, count, rows, out, state, target):
    """Normalised outputs, [tokens, heads * head_dim] in the dtype of the next product's input."""
    size, padded = op[9], pad(op[9])
    stride, first = pad(op[7] * size), np.int64(i32_pointer(op[6])[4 * item])
    for r in range(count):
        total = splat(reduce_add(load(state, (rows + r) * LANES)))
        to = (first + r // group) * stride + (kv_head * group + r % group) * size
        for i in range(0, size, LANES):
            value = load(out, r * padded + i) / total
            if i + LANES <= size:
                store(target, to + i, value)
            else:
                store(out, r * padded + i, value)
                for j in range(i, size):
                    put(target, to + j, out[r * padded + j])
