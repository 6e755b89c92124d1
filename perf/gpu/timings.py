"""First timings: each family at sizes of serving, by CUDA events, with the bytes or operations it cannot do without.

Medians of ten launches after a warm-up, the L2 cache overwritten before each.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from engine.devices.cuda.ops import gemm, layers
from engine.devices.cuda.ops.attention import Partials, Ragged, max_partials, paged_attention, plan_attention
from engine.devices.cuda.ops.gemm import Epilogue
from engine.devices.cuda.ops.kv import Pages
from engine.devices.cuda.registry import KernelRegistry
from engine.devices.cuda.weights import LinearWeight

_REPEATS = 10
_FLUSH_BYTES = 256 << 20
_BF16 = np.dtype(ml_dtypes.bfloat16)


def timings(registry: KernelRegistry) -> list[dict[str, Any]]:
    """One record per case: name, milliseconds, and GB/s or TFLOP/s."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    records = [*_products(registry, stream), *_attention(registry, stream)]
    x, out = _random((2048, 4096), np.dtype(np.float32)), cupy.empty((2048, 4096), _BF16)
    norm = _random((4096,), np.dtype(np.float32))

    def launch() -> None:
        layers.rms_norm(registry, x, norm, out, 2048, 1e-5, stream=stream)

    return [*records, _record("rms_norm 2048x4096", launch, stream, nbytes=x.nbytes + out.nbytes)]


def _products(registry: KernelRegistry, stream: Any) -> list[dict[str, Any]]:
    import cupy

    records = []
    n = k = 4096
    for rows in (1, 16, 64, 512, 4096):
        for int8 in (False, True):
            kind = np.dtype(np.int8) if int8 else _BF16
            weight = LinearWeight(_random((n, k), kind), _random((n,), np.dtype(np.float32)) if int8 else None, None)
            x, out = _random((rows, k), _BF16), cupy.empty((rows, n), _BF16)

            def launch(x: Any = x, weight: Any = weight, out: Any = out, rows: int = rows) -> None:
                gemm.linear(registry, x, weight, out, rows, Epilogue.STORE, stream=stream)

            name = f"gemm {rows}x{n}x{k}{' int8' if int8 else ''}"
            work = {"nbytes": weight.values.nbytes} if rows <= 64 else {"operations": 2 * rows * n * k}
            records.append(_record(name, launch, stream, **work))
    return records


def _attention(registry: KernelRegistry, stream: Any) -> list[dict[str, Any]]:
    """64 rows of 2,048 keys that decode, and one prompt of 2,048; 32 heads over 8 of 128."""
    import cupy

    rows, length, heads, kv_heads, size = 64, 2048, 32, 8, 128
    pages = Pages(*(_random((rows * length // 16, kv_heads, 16, size), _BF16) for _ in range(2)))
    table = cupy.asarray(np.arange(rows * length // 16, dtype=np.int32).reshape(rows, -1))
    partials = max_partials(rows, length)
    room = Partials(cupy.empty((partials, heads, size), np.float32), cupy.empty((partials, heads, 2), np.float32))
    records = []
    for name, counts in (("decode", [1] * rows), ("prefill", [length])):
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
            {"nbytes": 2 * rows * length * kv_heads * size * 2}
            if name == "decode"
            else {"operations": 2 * heads * size * length * length}  # half of 4: causal
        )
        records.append(_record(f"attention {name} {len(counts)} x {length} keys", launch, stream, **work))
    return records


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
