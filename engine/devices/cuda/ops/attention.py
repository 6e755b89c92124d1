"""Launches of cuda_src/attention: paged attention of a step's ragged batch.

    plan_attention(what the host knows of the step) -> AttentionPlan --every layer--> paged_attention

Entries of one token go to the decode kernel, which cuts their keys into splits and needs room for partial results;
longer ones, and those for which there is no room, go to the prefill kernel, which needs none. Which kernel computes
a token does not change a bit of its result (`cuda_src/attention/tile.cuh`), so the choice is free.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cuda.ops.kv import NULL, Pages, page_defines
from engine.devices.cuda.registry import KernelRegistry, Variant

_V0, _V1_PREFILL, _V1_DECODE = "attention/v0.cu", "attention/v1_prefill.cu", "attention/v1_decode.cu"

_V1_HEAD_DIMS = (64, 80, 96, 128, 256)

SPLIT = 256
"""Keys per split, as in cuda_src/attention/batch.cuh."""

_MOST_PARTIALS = 4096
"""A million keys of decoding rows; with 32 heads of 128 that is 68 MB."""

_ROWS = 64
"""Query rows per block of prefill."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Which tokens belong to which sequence, on the GPU.

    Attributes:
        query_start_loc: i32 [entries + 1], first token of each entry, then the number of tokens.
        entry_rows: i32 [entries], row of the block table.
        seq_lens: i32 [entries], tokens in the sequence after the step.
    """

    query_start_loc: Any
    entry_rows: Any
    seq_lens: Any


@dataclass(frozen=True, slots=True)
class Partials:
    """Room for results of splits, before they are joined.

    Attributes:
        outputs: f32 [partials, heads, head_dim].
        softmax: f32 [partials, heads, 2].
    """

    outputs: Any
    softmax: Any


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the kernels share a step's entries.

    Attributes:
        tokens, entries: of the step.
        decode_tokens: entries of at most so many tokens are for the decode kernel.
        chunks: whether an entry has more.
        splits: blocks along the keys of a decode; fewer than its splits take several each.
    """

    tokens: int
    entries: int
    decode_tokens: int
    chunks: bool
    splits: int


def max_partials(max_num_seqs: int, max_model_len: int) -> int:
    """First dimension of `Partials` that suits these limits."""
    return min(max_num_seqs * -(-max_model_len // SPLIT), _MOST_PARTIALS)


def plan_attention(num_tokens: NDArray[np.int32], seq_lens: NDArray[np.int32], partials: int) -> AttentionPlan:
    """The plan for entries of `num_tokens` tokens that end sequences of `seq_lens`, given room for `partials`."""
    splits = -(-seq_lens[num_tokens == 1] // SPLIT)
    tokens, entries = int(num_tokens.sum()), len(num_tokens)
    if not len(splits) or splits.sum() > partials:
        return AttentionPlan(tokens, entries, decode_tokens=0, chunks=True, splits=0)
    chunks = bool((num_tokens > 1).any())
    return AttentionPlan(tokens, entries, decode_tokens=1, chunks=chunks, splits=int(splits.max()))


def paged_attention(
    registry: KernelRegistry,
    queries: Any,
    pages: Pages,
    block_table: Any,
    ragged: Ragged,
    plan: AttentionPlan,
    partials: Partials,
    out: Any,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Any = None,
    stream: Any,
) -> None:
    """Causal attention of every token to the pages of its sequence, which hold its own key already.

    Args:
        queries, out: [tokens, heads * head_dim] bf16 or f16; out is written.
        block_table: i32 [rows, blocks_per_row] of the layer's KV group.
        window: keys a token sees, itself included; 0 is all.
        soft_cap: logits become soft_cap * tanh(logits / soft_cap); 0 is off.
        sinks: f32 [heads], logits without a value that take part in the softmax.
    """
    if not plan.tokens:
        return
    launch = _Launch(registry, queries, pages, block_table, ragged, plan, partials, out, scale, window, soft_cap, sinks)
    if pages.head_dim not in _V1_HEAD_DIMS:
        launch.v0(stream)
        return
    if plan.chunks:
        launch.prefill(stream)
    if plan.decode_tokens:
        launch.decode(stream)


def variants(dtype: np.dtype[Any], head_dim: int, block_size: int, kv_int8: bool) -> Iterator[Variant]:
    """All that `paged_attention` may launch for a model."""
    for source in (_V1_PREFILL, _V1_DECODE) if head_dim in _V1_HEAD_DIMS else (_V0,):
        yield Variant.of(source, page_defines(dtype, head_dim, block_size, kv_int8))


def pipeline_bytes(head_dim: int, kv_int8: bool) -> int:
    """Shared memory of the tiles in flight: PIPELINE_BYTES of cuda_src/attention/tile.cuh."""
    tile = 16 if head_dim > 128 else 32
    elements = 2 * tile * (2 * head_dim + 16)
    return 2 * (2 * tile * head_dim + 8 * tile) + elements if kv_int8 else 2 * elements


@dataclass(frozen=True, slots=True)
class _Launch:
    """The arguments of `paged_attention`, put in order for each kernel."""

    registry: KernelRegistry
    queries: Any
    pages: Pages
    block_table: Any
    ragged: Ragged
    plan: AttentionPlan
    partials: Partials
    out: Any
    scale: float
    window: int
    soft_cap: float
    sinks: Any

    @property
    def heads(self) -> int:
        return int(self.queries.shape[1]) // self.pages.head_dim

    @property
    def group(self) -> int:
        return self.heads // self.pages.kv_heads

    @property
    def defines(self) -> dict[str, int]:
        return self.pages.defines(self.queries.dtype)

    @property
    def shared(self) -> int:
        return pipeline_bytes(self.pages.head_dim, self.pages.key_scales is not None)

    @property
    def sinks_or_null(self) -> Any:
        return NULL if self.sinks is None else self.sinks

    @property
    def arrays(self) -> tuple[Any, ...]:
        ragged = self.ragged
        entries = (ragged.query_start_loc, ragged.entry_rows, ragged.seq_lens)
        return self.queries, *self.pages.arrays, self.block_table, *entries, self.sinks_or_null, self.out

    @property
    def numbers(self) -> tuple[np.generic, ...]:
        return np.int32(self.window), np.float32(self.scale), np.float32(self.soft_cap)

    def v0(self, stream: Any) -> None:
        kernel = self.registry.get(_V0, "attention_v0", self.defines)
        shape = (np.int32(self.plan.entries), np.int32(self.pages.kv_heads), np.int32(self.block_table.shape[1]))
        kernel((self.plan.tokens, self.heads), (32,), (*self.arrays, *shape, *self.numbers), stream=stream)

    def prefill(self, stream: Any) -> None:
        kernel = self.registry.get(_V1_PREFILL, "attention_v1_prefill", self.defines)
        args = (*self.arrays, np.int32(self.plan.entries), *self._shape(), *self.numbers)
        grid = (self.plan.tokens * self.group // _ROWS + self.plan.entries, self.pages.kv_heads)
        shared = self.shared + 4 * _ROWS * self.pages.head_dim
        kernel(grid, (2 * _ROWS,), args, shared_mem=shared, stream=stream)

    def decode(self, stream: Any) -> None:
        plan, partials, ragged = self.plan, self.partials, self.ragged
        kernel = self.registry.get(_V1_DECODE, "attention_v1_decode", self.defines)
        args = (*self.arrays, partials.outputs, partials.softmax, *self._shape(), *self.numbers)
        row_tiles = -(-plan.decode_tokens * self.group // 16)
        grid = (plan.splits, self.pages.kv_heads * row_tiles, plan.entries)
        kernel(grid, (32,), args, shared_mem=self.shared, stream=stream)
        if plan.splits == 1:
            return
        merge = self.registry.get(_V1_DECODE, "attention_v1_merge", self.defines)
        arrays = (partials.outputs, partials.softmax, ragged.query_start_loc, ragged.seq_lens, self.sinks_or_null)
        scalars = (np.int32(plan.decode_tokens), np.int32(self.window))
        grid = (self.heads, plan.decode_tokens, plan.entries)
        merge(grid, (32,), (*arrays, self.out, *scalars), stream=stream)

    def _shape(self) -> tuple[np.generic, ...]:
        return (
            np.int32(self.heads),
            np.int32(self.pages.kv_heads),
            np.int32(self.block_table.shape[1]),
            np.int32(self.plan.decode_tokens),
        )
