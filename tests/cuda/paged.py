"""A paged cache with scattered blocks, every unused byte poison, and attention to it in float64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cuda.ops.attention import Partials, Ragged, plan_attention
from engine.devices.cuda.ops.kv import Pages
from tests.gpu_without_gpu.executor import poisoned

FAR = 10**8
"""A block that does not exist: to follow it is an access out of bounds."""


@dataclass(frozen=True, slots=True)
class Config:
    """What kernels are compiled for, and the query heads they run with."""

    head_dim: int
    dtype: np.dtype[Any]
    kv_int8: bool
    heads: int
    kv_heads: int
    block_size: int = 16

    def __str__(self) -> str:
        stored = "int8" if self.kv_int8 else "kv"
        return f"{self.head_dim}-{self.dtype.name}-{stored}-{self.heads}:{self.kv_heads}-{self.block_size}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries of a step over sequences whose keys and values are in the pages already.

    Attributes:
        keys, values: of each row [seq_len, kv_heads, head_dim] float64, as the pages hold them.
        num_tokens, seq_lens: of each entry. Entries may share a row: one sequence at several lengths.
    """

    config: Config
    queries: NDArray[Any]
    pages: Pages
    block_table: NDArray[np.int32]
    ragged: Ragged
    keys: dict[int, NDArray[np.float64]]
    values: dict[int, NDArray[np.float64]]
    num_tokens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]

    def plan(self, partials: int = 64) -> Any:
        return plan_attention(self.num_tokens, self.seq_lens, partials)

    def partials(self, count: int = 64) -> Partials:
        config = self.config
        return Partials(
            poisoned((count, config.heads, config.head_dim), np.float32), poisoned((count, config.heads, 2), np.float32)
        )


def make_batch(
    config: Config, entries: list[tuple[int, int]], *, window: int = 0, rows: list[int] | None = None, seed: int = 0
) -> Batch:
    """Entries of (tokens, seq_len), each with a row of its own unless `rows` says otherwise.

    Keys that no token of an entry sees under `window` are not there: their slots hold poison, and blocks of them
    alone are not in the table.
    """
    random = np.random.default_rng(seed)
    num_tokens, seq_lens = (np.array(column, np.int32) for column in zip(*entries, strict=True))
    entry_rows = np.array(random.permutation(len(entries) + 2)[: len(entries)] if rows is None else rows, np.int32)
    lengths = {int(row): int(seq_lens[entry_rows == row].max()) for row in entry_rows}
    firsts = {
        int(row): int(np.maximum(0, seq_lens - num_tokens - window + 1)[entry_rows == row].min()) if window else 0
        for row in entry_rows
    }
    size = config.block_size
    num_blocks = 3 + sum(-(-length // size) for length in lengths.values())
    free = list(random.permutation(num_blocks))
    table = np.full((max(lengths) + 1, 1 + -(-max(lengths.values()) // size)), FAR, np.int32)
    shape = (num_blocks, config.kv_heads, size, config.head_dim)
    stores = [_Store(config, shape), _Store(config, shape)]
    dense: list[dict[int, NDArray[np.float64]]] = [{}, {}]
    for row, length in lengths.items():
        for index in range(firsts[row] // size, -(-length // size)):
            table[row, index] = free.pop()
        for store, tensors in zip(stores, dense, strict=True):
            tensors[row] = np.full((length, *shape[1::2]), np.nan)
            for position in range(firsts[row], length):
                block = int(table[row, position // size])
                tensors[row][position] = store.put(block, position % size, random)
    keys, values = stores
    for array in (table, keys.pages, values.pages, keys.scales, values.scales):
        if array is not None:
            array.flags.writeable = False
    queries = random.standard_normal((int(num_tokens.sum()), config.heads * config.head_dim)).astype(config.dtype)
    starts = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int32)
    return Batch(
        config, queries, Pages(keys.pages, values.pages, keys.scales, values.scales), table,
        Ragged(starts, entry_rows, seq_lens), dense[0], dense[1], num_tokens, seq_lens,
    )  # fmt: skip


class _Store:
    """Pages of keys or of values."""

    def __init__(self, config: Config, shape: tuple[int, ...]) -> None:
        self._dtype = config.dtype
        self.pages = poisoned(shape, np.int8 if config.kv_int8 else config.dtype)
        self.scales = poisoned(shape[:3], np.float32) if config.kv_int8 else None

    def put(self, block: int, slot: int, random: np.random.Generator) -> NDArray[np.float64]:
        """Fill a slot; what attention must read from it."""
        x = random.standard_normal(self.pages.shape[1::2]).astype(np.float32)
        if self.scales is None:
            self.pages[block, :, slot] = rounded = x.astype(self._dtype)
            return rounded.astype(np.float64)
        scale = np.abs(x).max(-1) / np.float32(127)
        self.pages[block, :, slot] = np.rint(x / scale[:, None])
        self.scales[block, :, slot] = scale
        stored: NDArray[np.float32] = self.pages[block, :, slot].astype(np.float32) * scale[:, None]
        return stored.astype(self._dtype).astype(np.float64)


def reference(
    batch: Batch, *, scale: float, window: int = 0, soft_cap: float = 0.0, sinks: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention in float64, and the bound of what rounding may change: both [tokens, heads * head_dim].

    Weights and outputs are rounded to the element type, by at most half a unit in the last place of each.
    """
    config = batch.config
    group = config.heads // config.kv_heads
    queries = batch.queries.reshape(-1, config.heads, config.head_dim).astype(np.float64)
    out, magnitude = np.zeros_like(queries), np.zeros_like(queries)
    token = 0
    for row, count, length in zip(batch.ragged.entry_rows, batch.num_tokens, batch.seq_lens, strict=True):
        for position in range(length - count, length):
            seen = slice(max(0, position - window + 1) if window else 0, position + 1)
            for head in range(config.heads):
                keys, values = (x[int(row)][seen, head // group] for x in (batch.keys, batch.values))
                logits = keys @ queries[token, head] * scale
                if soft_cap:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(logits.max(), sink)
                weights = np.exp(logits - top)
                weights /= weights.sum() + np.exp(sink - top)
                out[token, head] = weights @ values
                magnitude[token, head] = weights @ np.abs(values)
            token += 1
    half_unit = 2.0**-8 if config.dtype.name == "bfloat16" else 2.0**-11
    bound = half_unit * (np.abs(out) + magnitude) * 1.02 + 1e-5
    return out.reshape(len(out), -1), bound.reshape(len(out), -1)
