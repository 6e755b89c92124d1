"""L1 on the card: each family's kernels against float64 NumPy, through the launchers that the engine uses.

A few shapes per version, chosen for their tails; `tests/cuda/` has the full matrix, for the CPU executor.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.devices.cuda.ops import gemm, kv, layers, sampling
from engine.devices.cuda.ops.attention import paged_attention
from engine.devices.cuda.ops.gemm import Epilogue
from engine.devices.cuda.registry import KernelRegistry
from engine.plan import RowState
from tests.cuda.paged import Config, make_batch, reference

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}

Check = Callable[[KernelRegistry, str], Iterator[tuple[str, float]]]
"""Of a registry and an element type; yields a case's name and its largest error as a share of what is allowed."""


def check_gemm(registry: KernelRegistry, dtype: str) -> Iterator[tuple[str, float]]:
    rng, element = np.random.default_rng(0), DTYPES[dtype]
    shapes = ((1, 576, 576), (16, 192, 1536), (17, 1024, 576), (130, 200, 80), (300, 4096, 1024), (5, 33, 7))
    for m, n, k in shapes:
        for int8 in (False, True):
            x = rng.standard_normal((m, k)).astype(element)
            values = rng.integers(-127, 128, (n, k)) if int8 else rng.standard_normal((n, k))
            values = values.astype(np.int8 if int8 else element)
            scales = rng.uniform(0.001, 0.01, n).astype(np.float32) if int8 else None
            bias = rng.standard_normal(n).astype(np.float32)
            wide = values.astype(np.float64) * (1.0 if scales is None else scales[:, None].astype(np.float64))
            expected = x.astype(np.float64) @ wide.T + bias
            bound = (np.abs(x.astype(np.float64)) @ np.abs(wide).T + np.abs(bias)) * (k + 4) * 2.0**-23
            out = np.full((m, n), np.nan, np.float32)
            weight = SimpleNamespace(values=values, scales=scales, bias=bias)
            gemm.linear(registry, x, weight, out, m, Epilogue.STORE_F32, stream=None)
            yield f"gemm {m}x{n}x{k}{' int8' if int8 else ''}", float((np.abs(out - expected) / bound).max())


def check_attention(registry: KernelRegistry, dtype: str) -> Iterator[tuple[str, float]]:
    entries = [(1, 300), (21, 21), (1, 16), (5, 261), (1, 1030), (70, 530)]
    for head_dim, heads, kv_heads in ((64, 9, 3), (80, 4, 1), (96, 4, 4), (128, 16, 2), (256, 4, 2)):
        for int8, window in ((False, 0), (True, 0), (False, 100)):
            batch = make_batch(Config(head_dim, DTYPES[dtype], int8, heads, kv_heads), entries, window=window)
            expected, bound = reference(batch, scale=head_dim**-0.5, window=window)
            out = np.full(batch.queries.shape, np.nan, DTYPES[dtype])
            paged_attention(
                registry, batch.queries, batch.pages, batch.block_table, batch.ragged, batch.plan(), batch.partials(),
                out, scale=head_dim**-0.5, window=window, stream=None,
            )  # fmt: skip
            name = f"attention {head_dim} {heads}:{kv_heads}{' int8' if int8 else ''}{' window' if window else ''}"
            yield name, float((np.abs(out.astype(np.float64) - expected) / bound).max())


def check_rope(registry: KernelRegistry, dtype: str) -> Iterator[tuple[str, float]]:
    rng, element = np.random.default_rng(2), DTYPES[dtype]
    tokens, heads, kv_heads, size = 37, 4, 2, 80
    qkv = rng.standard_normal((tokens, (heads + 2 * kv_heads) * size)).astype(element)
    angles = rng.uniform(-3, 3, (64, size // 2))
    rope = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    pages = kv.Pages(*(np.zeros((4, kv_heads, 16, size), element) for _ in range(2)))
    table, rows = np.array([[3, 1, 0]], np.int32), np.zeros(tokens, np.int32)
    positions = np.arange(5, 5 + tokens, dtype=np.int32)
    queries = np.full((tokens, heads * size), np.nan, element)
    kv.rope_and_cache(registry, qkv, rope, pages, table, rows, positions, queries, tokens, stream=None)
    wide = qkv.astype(np.float64).reshape(tokens, -1, size)
    a, b = wide[..., : size // 2], wide[..., size // 2 :]
    cosine, sine = (part[positions, None].astype(np.float64) for part in np.split(rope, 2, axis=1))
    turned = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
    bound = ULP[dtype] * np.abs(wide).max() * 2
    rotated = queries.astype(np.float64).reshape(tokens, heads, size)
    yield "rope queries", float(np.abs(rotated - turned[:, :heads]).max() / bound)
    stored = np.stack([pages.keys[table[0, p // 16], :, p % 16] for p in positions]).astype(np.float64)
    yield "rope keys", float(np.abs(stored - turned[:, heads : heads + kv_heads]).max() / bound)


def check_layers(registry: KernelRegistry, dtype: str) -> Iterator[tuple[str, float]]:
    rng = np.random.default_rng(3)
    for width in (64, 576, 4096, 7):
        x, weight = rng.standard_normal((9, width)).astype(np.float32), rng.standard_normal(width).astype(np.float32)
        out = np.full((9, width), np.nan, DTYPES[dtype])
        layers.rms_norm(registry, x, weight, out, 9, 1e-5, stream=None)
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
        bound = ULP[dtype] * np.abs(expected) + 1e-5
        yield f"rms_norm {width}", float((np.abs(out.astype(np.float64) - expected) / bound).max())


def check_sampling(registry: KernelRegistry, dtype: str) -> Iterator[tuple[str, float]]:
    """Greedy ids, and counts of 4,000 samples against their probabilities; the element type has no part in it."""
    del dtype
    vocab, samples = 50_001, 64
    logits = np.random.default_rng(4).standard_normal((samples, vocab)).astype(np.float32) * 3
    ids = _sample(registry, logits, temperature=0.0)
    yield "sample greedy", float((ids != logits.argmax(axis=1)).sum())
    few = np.log(np.tile(np.array([0.5, 0.25, 0.125, 0.125], np.float32), (4000, 1)))
    counts = np.bincount(_sample(registry, few, temperature=1.0), minlength=4) / 4000
    yield "sample frequencies", float(np.abs(counts - np.exp(few[0])).max() / 0.04)


def _sample(registry: KernelRegistry, logits: NDArray[np.float32], temperature: float) -> NDArray[np.int32]:
    samples, vocab = logits.shape
    state = RowState(
        row=0, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=11, choice=0, banned_ids=(), min_position=0,
        num_logprobs=-1, num_prompt_logprobs=-1,
    )  # fmt: skip
    record, _ = sampling.pack_row(state, vocab)
    empty = np.zeros(1, np.int32)
    last_ids = np.zeros(samples, np.int32)
    on_gpu = sampling.SamplingState(np.repeat(record, samples), empty, empty, empty, last_ids, vocab, 8192)
    index, ids = np.arange(samples, dtype=np.int32), np.full(samples, -1, np.int32)
    sampling.sample(
        registry, on_gpu, logits=logits, logit_rows=index, rows=index, positions=index, masks=None,
        changed=np.empty_like(logits), token_ids=ids, faulted=np.ones(samples, np.int32), samples=samples, stream=None,
    )  # fmt: skip
    return ids


CHECKS: tuple[Check, ...] = (check_gemm, check_attention, check_rope, check_layers, check_sampling)
