"""First timings: each family at sizes of serving, by CUDA events, with the bytes or operations it cannot do without.

Medians of ten launches after a warm-up, the L2 cache overwritten before each.
"""

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np

from engine.devices.cuda.ops import cublas, gemm, layers, sampling
from engine.devices.cuda.ops.attention import Partials, Ragged, max_partials, paged_attention, plan_attention
from engine.devices.cuda.ops.gemm import Epilogue
from engine.devices.cuda.ops.kv import Pages
from engine.devices.cuda.registry import KernelRegistry
from engine.devices.cuda.weights import LinearWeight
from engine.plan import RowState

_REPEATS = 10
_FLUSH_BYTES = 256 << 20
_BF16 = np.dtype(ml_dtypes.bfloat16)


def timings(registry: KernelRegistry) -> Iterator[dict[str, Any]]:
    """One record per case: name, milliseconds, and GB/s or TFLOP/s."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    yield _copy(stream)
    yield from _host_launches(registry, stream)
    yield from _products(registry, stream)
    yield from _attention(registry, stream)
    for rows in (1, 2048):
        x, out = _random((rows, 4096), np.dtype(np.float32)), cupy.empty((rows, 4096), _BF16)
        norm = _random((4096,), np.dtype(np.float32))
        launch = partial(layers.rms_norm, registry, x, norm, out, rows, 1e-5, stream=stream)
        yield _record(f"rms_norm {rows}x4096", launch, stream, nbytes=x.nbytes + out.nbytes)
    yield from _samples(registry, stream)


def _copy(stream: Any) -> dict[str, Any]:
    """What this memory gives: 2 GB read and 2 GB written."""
    import cupy

    source, target = (cupy.empty((2 << 30,), np.uint8) for _ in range(2))
    launch = partial(target.data.copy_from_device_async, source.data, source.nbytes, stream)
    return _record("copy of 2 GiB", launch, stream, nbytes=2 * source.nbytes)


def _host_launches(registry: KernelRegistry, stream: Any) -> Iterator[dict[str, Any]]:
    """What a launch costs the host, ours and cuBLAS's: of a small product, 200 in a row."""
    import cupy

    weight = LinearWeight(_random((64, 64), _BF16), None, None)
    x, out = _random((64, 64), _BF16), cupy.empty((64, 64), _BF16)
    args = (x, weight, out, 64, Epilogue.STORE)
    launches = {"a launch": partial(gemm.linear, registry, *args, stream=stream)}
    if cublas.missing() is None:
        launches["a cuBLAS product"] = partial(cublas.linear, *args, stream=stream)
    for name, launch in launches.items():
        times = []
        for _ in range(11):
            began = perf_counter()
            for _ in range(200):
                launch()
            times.append((perf_counter() - began) / 200 * 1e3)
            stream.synchronize()
        yield {"name": f"host time of {name}", "ms": float(np.median(times))}


_SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (960, 576), (49152, 576))
"""Outputs and inputs: of Llama-3-8B, then of SmolLM2-135M."""


def _products(registry: KernelRegistry, stream: Any) -> Iterator[dict[str, Any]]:
    import cupy

    for n, k in _SHAPES:
        for rows in (1, 16, 32, 64, 128, 512, 4096) if n == k else (1, 32, 64):
            for version in ("", " int8", " cublas"):
                if (version == " int8" and n != k) or (version == " cublas" and cublas.missing() is not None):
                    continue
                int8 = version == " int8"
                scales = _random((n,), np.dtype(np.float32)) if int8 else None
                weight = LinearWeight(_random((n, k), np.dtype(np.int8) if int8 else _BF16), scales, None)
                x, out = _random((rows, k), _BF16), cupy.empty((rows, n), _BF16)
                args = (x, weight, out, rows, Epilogue.STORE)
                launch = (
                    partial(cublas.linear, *args, stream=stream)
                    if version == " cublas"
                    else partial(gemm.linear, registry, *args, stream=stream)
                )
                work = {"nbytes": weight.values.nbytes} if rows <= 128 else {"operations": 2 * rows * n * k}
                yield _record(f"gemm {rows}x{n}x{k}{version}", launch, stream, **work)


def _samples(registry: KernelRegistry, stream: Any) -> Iterator[dict[str, Any]]:
    """64 rows of 128,256 logits: greedy, and with every filter."""
    import cupy

    rows, vocab = 64, 128_256
    logits = _random((rows, vocab), np.dtype(np.float32))
    index, last_ids, ids, faulted = (cupy.asarray(np.arange(rows, dtype=np.int32)) for _ in range(4))
    empty = cupy.empty((1,), np.int32)
    for name, temperature in (("greedy", 0.0), ("top-k and top-p", 1.0)):
        row = RowState(
            row=0, temperature=temperature, top_k=50, top_p=0.9, min_p=0.0, seed=1, choice=0, banned_ids=(),
            min_position=0, num_logprobs=-1, num_prompt_logprobs=-1,
        )  # fmt: skip
        records = np.repeat(sampling.pack_row(row, vocab)[0], rows)
        params = cupy.asarray(records.view(np.int32).reshape(rows, -1))
        state = sampling.SamplingState(params, empty, empty, empty, last_ids, vocab, 8192)
        launch = partial(
            sampling.sample, registry, state, logits=logits, logit_rows=index, rows=index, positions=index, masks=None,
            changed=logits, token_ids=ids, faulted=faulted, samples=rows, stream=stream,
        )  # fmt: skip
        yield _record(f"sample {rows}x{vocab} {name}", launch, stream)


def _attention(registry: KernelRegistry, stream: Any) -> Iterator[dict[str, Any]]:
    """64 rows of 2,048 keys that decode, and one prompt of 2,048; 32 heads over 8 of 128."""
    import cupy

    rows, length, heads, kv_heads, size = 64, 2048, 32, 8, 128
    pages = Pages(*(_random((rows * length // 16, kv_heads, 16, size), _BF16) for _ in range(2)))
    table = cupy.asarray(np.arange(rows * length // 16, dtype=np.int32).reshape(rows, -1))
    partials = max_partials(rows, length)
    room = Partials(cupy.empty((partials, heads, size), np.float32), cupy.empty((partials, heads, 2), np.float32))
    for name, counts in (("decode", [1]), ("decode", [1] * rows), ("prefill", [length])):
        num_tokens, lens = np.array(counts, np.int32), np.full(len(counts), length, np.int32)
        firsts = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int32)
        parts = (firsts, np.arange(len(counts), dtype=np.int32), lens)
        ragged = Ragged(*map(cupy.asarray, parts))
        plan = plan_attention(num_tokens, lens, partials)
        queries, out = (_random((int(num_tokens.sum()), heads * size), _BF16) for _ in range(2))

        def launch(queries: Any = queries, ragged: Any = ragged, plan: Any = plan, out: Any = out) -> None:
            args = (queries, pages, table, ragged, plan, room, out)
            paged_attention(registry, *args, scale=size**-0.5, stream=stream)

        work = (
            {"nbytes": 2 * len(counts) * length * kv_heads * size * 2}
            if name == "decode"
            else {"operations": 2 * heads * size * length * length}  # half of 4: causal
        )
        yield _record(f"attention {name} {len(counts)} x {length} keys", launch, stream, **work)


def _record(
    name: str, launch: Callable[[], None], stream: Any, *, nbytes: int = 0, operations: int = 0
) -> dict[str, Any]:
    import cupy

    flush = cupy.empty((_FLUSH_BYTES,), np.uint8)
    times = []
    for _ in range(_REPEATS + 1):
        flush.data.memset_async(0, _FLUSH_BYTES, stream)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        launch()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end))
    milliseconds = float(np.median(times[1:]))
    record: dict[str, Any] = {"name": name, "ms": milliseconds}
    if nbytes:
        record["GB/s"] = nbytes / milliseconds / 1e6
    if operations:
        record["TFLOP/s"] = operations / milliseconds / 1e9
    return record


def _random(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    import cupy

    target = cupy.empty(shape, dtype)
    whole = np.random.default_rng(0).integers(-127, 128, 1 << 16)
    tile = whole.astype(np.int8) if dtype == np.int8 else (whole / 64).astype(dtype)
    target.set(np.resize(tile, shape))
    return target
