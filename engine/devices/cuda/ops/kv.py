"""Launches of cuda_src/kv: keys and values into pages, and whole blocks from place to place.

All pages of a model are one pool [2 * slots, num_blocks, kv_heads, block_size, head_dim], keys and values of each
slot in turn, and for int8 one pool of scales [2 * slots, num_blocks, kv_heads, block_size]; a slot serves one layer
of each KV group. `Pages` is what one layer sees of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.devices.cuda.registry import KernelRegistry, Variant

_ROPE, _BLOCKS = "kv/rope_and_cache.cu", "kv/blocks.cu"

NULL = np.uint64(0)
"""A pointer parameter that the kernel does not follow."""

_WORDS = (16, 4)
"""Bytes that a thread moves at a time; scales of small blocks are not a multiple of 16."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of one layer.

    Attributes:
        keys, values: [num_blocks, kv_heads, block_size, head_dim] bf16, f16 or int8.
        key_scales, value_scales: f32 [num_blocks, kv_heads, block_size] for int8, else None.
    """

    keys: Any
    values: Any
    key_scales: Any = None
    value_scales: Any = None

    @classmethod
    def of(cls, pool: Any, scales: Any, slot: int) -> "Pages":
        """A slot of the pool; `scales` is None unless the pool is int8."""
        if scales is None:
            return cls(pool[2 * slot], pool[2 * slot + 1])
        return cls(pool[2 * slot], pool[2 * slot + 1], scales[2 * slot], scales[2 * slot + 1])

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.keys.shape[3])

    @property
    def arrays(self) -> tuple[Any, Any, Any, Any]:
        """The kernels' four arguments."""
        if self.key_scales is None:
            return self.keys, self.values, NULL, NULL
        return self.keys, self.values, self.key_scales, self.value_scales

    def defines(self, dtype: np.dtype[Any]) -> dict[str, int]:
        """Macros of a kernel that reads or writes these pages and computes in `dtype`."""
        return page_defines(dtype, self.head_dim, int(self.keys.shape[2]), self.key_scales is not None)


def page_defines(dtype: np.dtype[Any], head_dim: int, block_size: int, kv_int8: bool) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "ELEM_BF16": int(dtype.name == "bfloat16"),
        "KV_INT8": int(kv_int8),
    }


def rope_and_cache(
    registry: KernelRegistry,
    qkv: Any,
    rope: Any,
    pages: Pages,
    block_table: Any,
    token_rows: Any,
    positions: Any,
    queries: Any,
    tokens: int,
    *,
    norms: tuple[Any, ...] = (),
    eps: float = 0.0,
    stream: Any,
) -> None:
    """Rotate queries and keys, write `queries` and the tokens' slots in the pages.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim] bf16 or f16.
        rope: f32 [max_model_len, head_dim], cosines, then sines; None for no rotation.
        block_table: i32 [rows, blocks_per_row] of the layer's KV group.
        token_rows, positions: i32 [tokens]; tokens at a negative position are left out.
        queries: [tokens, heads * head_dim], written; not scaled.
        norms: f32 [head_dim] weights of an RMSNorm of each query head and each key head; () for none.
    """
    if not tokens:
        return
    heads = qkv.shape[1] // pages.head_dim - 2 * pages.kv_heads
    kernel = registry.get(_ROPE, "rope_and_cache", pages.defines(qkv.dtype) | {"QK_NORM": int(bool(norms))})
    args = (
        qkv, queries, *pages.arrays, NULL if rope is None else rope, *(norms or (NULL, NULL)),
        block_table, token_rows, positions,
        np.int32(tokens), np.int32(heads), np.int32(pages.kv_heads), np.int32(block_table.shape[1]), np.float32(eps),
    )  # fmt: skip
    warps = tokens * (heads + 2 * pages.kv_heads)
    kernel((-(-warps // 4),), (128,), args, stream=stream)


def copy_blocks(registry: KernelRegistry, pool: Any, pairs: Any, count: int, *, stream: Any) -> None:
    """Copy blocks inside `pool` [slices, num_blocks, ...], as if one after another.

    pairs: i32 [count, 2], source and target.
    """
    _blocks(registry, "copy_blocks", pool, (pairs,), count, stream)


def gather_blocks(registry: KernelRegistry, pool: Any, blocks: Any, staging: Any, count: int, *, stream: Any) -> None:
    """staging[i] = pool[:, blocks[i]]: blocks i32 [count], staging [count, slices, ...]."""
    _blocks(registry, "gather_blocks", pool, (blocks, staging), count, stream)


def scatter_blocks(registry: KernelRegistry, pool: Any, blocks: Any, staging: Any, count: int, *, stream: Any) -> None:
    """pool[:, blocks[i]] = staging[i]: blocks i32 [count], distinct, staging [count, slices, ...]."""
    _blocks(registry, "scatter_blocks", pool, (blocks, staging), count, stream)


def variants(
    dtype: np.dtype[Any], head_dim: int, block_size: int, kv_int8: bool, qk_norm: bool = False
) -> Iterator[Variant]:
    """All that these functions may launch for a model."""
    yield Variant.of(_ROPE, page_defines(dtype, head_dim, block_size, kv_int8) | {"QK_NORM": int(qk_norm)})
    yield from (Variant.of(_BLOCKS, {"WORD_BYTES": size}) for size in _WORDS)


def _blocks(registry: KernelRegistry, name: str, pool: Any, arrays: tuple[Any, ...], count: int, stream: Any) -> None:
    if not count:
        return
    slices, num_blocks = pool.shape[:2]
    block_bytes = pool.nbytes // (slices * num_blocks)
    size = next(size for size in _WORDS if block_bytes % size == 0)
    words = block_bytes // size
    args = (pool, *arrays, np.int32(count), np.int32(words), np.int64(num_blocks * words))
    registry.get(_BLOCKS, name, {"WORD_BYTES": size})((-(-words // 256), slices), (256,), args, stream=stream)
