"""A token's bits on the card, wherever its row lies: what `--batch-invariant` stands on.

The kernels take for granted that mma computes a row alike at every place of a tile and that adding a product with 0
changes nothing (`cuda_src/attention/tile.cuh`). The executor does; a GPU is asked here. A case's error is the number
of elements whose bits differ, doubled, so that one of them fails it.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from engine.devices.cuda.ops import gemm
from engine.devices.cuda.ops.attention import AttentionPlan, paged_attention
from engine.devices.cuda.ops.gemm import Epilogue
from engine.devices.cuda.registry import KernelRegistry
from perf.gpu.kernels import DTYPES
from tests.cuda.paged import Batch, Config, make_batch


def check_gemm_rows(registry: KernelRegistry, dtype: str) -> Iterator[tuple[str, float]]:
    """Rows alone, among few, at every place of every tile, in two orders."""
    rng, rows = np.random.default_rng(5), 130
    for n, k, int8 in ((200, 576, False), (64, 4096, False), (200, 1536, True)):
        x = rng.standard_normal((rows, k)).astype(DTYPES[dtype])
        values = rng.integers(-127, 128, (n, k)).astype(np.int8) if int8 else rng.standard_normal((n, k))
        scales = rng.uniform(0.001, 0.01, n).astype(np.float32) if int8 else None
        weight = SimpleNamespace(values=values if int8 else values.astype(DTYPES[dtype]), scales=scales, bias=None)

        def product(x: NDArray[Any], weight: Any = weight, n: int = n) -> NDArray[np.float32]:
            out = np.full((len(x), n), np.nan, np.float32)
            gemm.linear(registry, x, weight, out, len(x), Epilogue.STORE_F32, stream=None)
            return out

        whole, name = product(x), f"gemm {n}x{k}{' int8' if int8 else ''}"
        for tile in gemm._TILES:
            with mock.patch.object(gemm, "_TILES", (tile,)):
                yield f"{name}: tile {tile['TILE_M']} x {tile['TILE_N']}", _differing(product(x), whole)
        order = rng.permutation(rows)
        yield f"{name}: another order", _differing(product(x[order]), whole[order])
        few = np.concatenate([product(x[first : first + 16].copy()) for first in range(0, rows, 16)])
        yield f"{name}: 16 at a time", _differing(few, whole)
        yield (
            f"{name}: alone",
            _differing(np.concatenate([product(x[i : i + 1].copy()) for i in range(20)]), whole[:20]),
        )


def check_attention_rows(registry: KernelRegistry, dtype: str) -> Iterator[tuple[str, float]]:
    """The same tokens by decoding, by prefill, and with a sequence cut into other chunks."""
    for config in (
        Config(64, DTYPES[dtype], False, 9, 3),
        Config(128, DTYPES[dtype], False, 16, 2),
        Config(128, DTYPES[dtype], True, 16, 2),
        Config(256, DTYPES[dtype], False, 4, 2),
    ):
        for window in (0, 90):
            batch = make_batch(config, [(1, 300), (5, 261), (1, 257), (12, 530)], window=window)
            tokens = len(batch.queries)
            plans = {
                "prefill": AttentionPlan(tokens, 4, decode_tokens=0, chunks=True, splits=0),
                "decode": AttentionPlan(tokens, 4, decode_tokens=12, chunks=False, splits=3),
                "few blocks": AttentionPlan(tokens, 4, decode_tokens=12, chunks=False, splits=2),
            }
            mixed = _attend(registry, batch, batch.plan(), window)
            for name, plan in plans.items():
                yield (
                    f"attention {config}{' window' if window else ''}: {name}",
                    _differing(_attend(registry, batch, plan, window), mixed),
                )
        whole = make_batch(config, [(290, 290)])
        expected = _attend(registry, whole, whole.plan(), 0)
        for cuts in ([7, 16, 150], [100, *range(250, 290)]):
            part = _cut(whole, cuts)
            yield f"attention {config}: {len(cuts)} cuts", _differing(_attend(registry, part, part.plan(), 0), expected)


def _cut(batch: Batch, cuts: list[int]) -> Batch:
    """One sequence's tokens as entries that end at `cuts` and at its end."""
    starts = np.array([0, *cuts, len(batch.queries)], np.int32)
    lens, row = starts[1:].copy(), batch.ragged.entry_rows
    ragged = replace(batch.ragged, query_start_loc=starts, entry_rows=np.repeat(row, len(lens)), seq_lens=lens)
    return replace(batch, ragged=ragged, num_tokens=np.diff(starts).astype(np.int32), seq_lens=lens)


def _attend(registry: KernelRegistry, batch: Batch, plan: AttentionPlan, window: int) -> NDArray[Any]:
    out = np.full(batch.queries.shape, np.nan, batch.queries.dtype)
    paged_attention(
        registry, batch.queries, batch.pages, batch.block_table, batch.ragged, plan, batch.partials(256), out,
        scale=batch.config.head_dim**-0.5, window=window, stream=None,
    )  # fmt: skip
    return out


def _differing(got: NDArray[Any], expected: NDArray[Any]) -> float:
    kind = {2: np.uint16, 4: np.uint32}[got.itemsize]
    return 2.0 * np.count_nonzero(got.view(kind) != expected.view(kind))


INVARIANCE = (check_gemm_rows, check_attention_rows)
