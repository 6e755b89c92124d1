"""Attention over pages against float64, for every way keys and values are stored, with its error bounded."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from engine.devices.cpu.kernels.constants import ATTENTION_BFLOAT16, ATTENTION_FLOAT32, COLUMNS, ROPE_AND_CACHE
from engine.devices.cpu.kernels.entries import ENTRIES
from engine.devices.cpu.kernels.native import call_op
from engine.devices.cpu.layout import KVLayout, aligned_bytes, padded

HEADS, KV_HEADS, BLOCKS = 6, 2, 64
FLOAT32, BFLOAT16, INT8_FLOAT32, INT8 = 0, 1, 2, 3


@njit
def _call(function: int, op: int, rows: int, items: int) -> None:
    call_op(function, op, rows, items, 0, 1, 1, 0)


_run: Any = _call


def attend(
    qkv: NDArray[np.float32], pages: int, head_dim: int, block_size: int, window: int, unit: int
) -> NDArray[np.float32]:
    """Outputs [tokens, heads * head_dim] of one sequence; rotations by nothing, so that the inputs are known."""
    tokens, scale = len(qkv), np.float64(head_dim**-0.5).view(np.int64)
    kv = KVLayout(BLOCKS, block_size, KV_HEADS, head_dim, (4, 2, 1, 1)[pages], 1)
    pool, scratch = aligned_bytes(kv.nbytes), aligned_bytes(1 << 20)
    pool[:] = 0xFF
    places = [pool.ctypes.data + first for first in kv.pages(0)]
    wide = np.zeros((tokens + 1, padded(qkv.shape[1])), np.float32)
    wide[:tokens, : qkv.shape[1]] = qkv
    queries = aligned_bytes(tokens * HEADS * padded(head_dim) * 4)
    angles = np.repeat([[1.0, 0.0]], head_dim // 2, axis=1).reshape(1, -1).repeat(tokens, 0).astype(np.float32)
    table = np.random.default_rng(0).permutation(BLOCKS).astype(np.int32)
    rows, positions = np.zeros(tokens, np.int32), np.arange(tokens, dtype=np.int32)
    starts = np.arange(0, tokens, unit)
    items = np.stack([starts, np.minimum(unit, tokens - starts), starts * 0, starts], axis=1).astype(np.int32)
    out = np.full((tokens, padded(HEADS * head_dim)), np.nan, np.float32)
    rope: Any = np.zeros(COLUMNS, np.int64)
    op: Any = np.zeros(COLUMNS, np.int64)
    at = [a.ctypes.data for a in (wide, queries, angles, table, rows, positions, out, items, scratch)]
    shape = [HEADS, KV_HEADS, head_dim, block_size, BLOCKS, pages]
    strides = [kv.block_nbytes, kv.head_nbytes]
    rope[1:20] = [at[0], at[1], *places[:2], at[2], at[3], at[4], at[5], *shape, scale, *places[2:], *strides]
    op[1:21] = [at[1], at[6], *places[:2], at[3], at[7], *shape, window, at[8], 0, 0, *places[2:], *strides]
    attention = ATTENTION_BFLOAT16 if pages in (BFLOAT16, INT8) else ATTENTION_FLOAT32
    _run(ENTRIES[ROPE_AND_CACHE].address, rope.ctypes.data, tokens, 0)
    _run(ENTRIES[attention].address, op.ctypes.data, tokens, len(items))
    return out[:, : HEADS * head_dim]


def exact(qkv: NDArray[np.float32], head_dim: int, window: int) -> NDArray[np.float64]:
    tokens, wide = len(qkv), qkv.astype(np.float64).reshape(len(qkv), -1, head_dim)
    positions = np.arange(tokens)
    seen = positions[:, None] >= positions
    if window:
        seen &= positions[:, None] - positions < window
    heads = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores = wide[:, head] @ wide[:, HEADS + kv].T * head_dim**-0.5
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(weights / weights.sum(axis=1, keepdims=True) @ wide[:, HEADS + KV_HEADS + kv])
    return np.concatenate(heads, axis=1)


def inputs(tokens: int, head_dim: int) -> NDArray[np.float32]:
    """Every value is a bfloat16, and so are queries times a scale of a power of two."""
    width = (HEADS + 2 * KV_HEADS) * head_dim
    values = np.random.default_rng(head_dim).standard_normal((tokens, width)) * 1.5
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize(("block_size", "window"), [(16, 0), (16, 70), (64, 0), (20, 33), (1, 0), (7, 5)])
@pytest.mark.parametrize(("pages", "bound"), [(FLOAT32, 2e-6), (BFLOAT16, 2.0**-9), (INT8_FLOAT32, 0.02), (INT8, 0.02)])
def test_near_float64(pages: int, bound: float, block_size: int, window: int) -> None:
    """bfloat16 rounds each weight by at most 2**-9 of it, and so an output by that of the largest value; int8 rounds
    keys and values by half a step of absmax / 127."""
    tokens = min(200, BLOCKS * block_size)
    qkv = inputs(tokens, 64)
    out = attend(qkv, pages, 64, block_size, window, unit=16)
    assert np.abs(out - exact(qkv, 64, window)).max() < bound * np.abs(qkv).max()


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("pages", [BFLOAT16, INT8])
def test_every_width_of_a_head(pages: int, head_dim: int) -> None:
    """The scale is no power of two here: queries are rounded to bfloat16 after it."""
    qkv = inputs(100, head_dim)
    out = attend(qkv, pages, head_dim, 16, 0, unit=16)
    assert np.abs(out - exact(qkv, head_dim, 0)).max() < 0.02 * np.abs(qkv).max()


@pytest.mark.parametrize("pages", [FLOAT32, BFLOAT16, INT8_FLOAT32, INT8])
def test_a_row_is_the_same_in_units_of_any_size(pages: int) -> None:
    qkv = inputs(150, 64)
    whole = attend(qkv, pages, 64, 16, 0, unit=16)
    for unit in (1, 2, 5):
        np.testing.assert_array_equal(attend(qkv, pages, 64, 16, 0, unit), whole)
