"""Launches of cuda_src/layers: embedding, row selection, RMSNorm, the gate of an MLP.

Version 1 of each serves widths that are a multiple of 8 and version 0 the rest. What a row becomes depends
on its width only, never on how many rows there are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.devices.cuda.registry import KernelRegistry, Variant

_V0, _V1, _V1_RMS_NORM = "layers/v0.cu", "layers/v1.cu", "layers/v1_rms_norm.cu"

_EMBEDDING = "embedding_v0", "embedding_v1"
_SELECT_ROWS = "select_rows_v0", "select_rows_v1"
_SILU_AND_MUL = "silu_and_mul_v0", "silu_and_mul_v1"

_THREADS = 256

_MOST_VECTORS = 8
"""Of 8 floats per thread: 64 registers, widths to 16,384."""


def embedding(registry: KernelRegistry, ids: Any, weight: Any, out: Any, rows: int, *, stream: Any) -> None:
    """out[row] = weight[ids[row]]: ids i32 [rows], weight [vocab, width] bf16 or f16, out f32 [rows, width]."""
    _by_rows(registry, _EMBEDDING, weight.dtype, weight.shape[1], rows, (ids, weight, out), stream)


def select_rows(registry: KernelRegistry, indices: Any, x: Any, out: Any, rows: int, *, stream: Any) -> None:
    """out[row] = x[indices[row]]: indices i32 [rows], x f32 [*, width], out f32 [rows, width]."""
    _by_rows(registry, _SELECT_ROWS, None, x.shape[1], rows, (indices, x, out), stream)


def silu_and_mul(
    registry: KernelRegistry, gate_up: Any, out: Any, rows: int, *, interleaved: bool, stream: Any
) -> None:
    """out = silu(gate) * up: gate_up [rows, 2 * width], out [rows, width], both bf16 or f16.

    Gates and ups lie side by side, or by 8 in turn if `interleaved`. Raises ValueError where that cannot be.
    """
    if interleaved and out.shape[1] % 8:
        raise ValueError(f"gates and ups interleaved in groups of 8 make no width of {out.shape[1]}")
    args = (gate_up, out)
    _by_rows(registry, _SILU_AND_MUL, out.dtype, out.shape[1], rows, args, stream, np.int32(interleaved))


def rms_norm(registry: KernelRegistry, x: Any, weight: Any, out: Any, rows: int, eps: float, *, stream: Any) -> None:
    """out = x / sqrt(mean(x**2) + eps) * weight: x f32 [rows, width], weight f32 [width], out bf16 or f16."""
    width = x.shape[1]
    plan = _norm_plan(width)
    defines = _element(out.dtype) | ({"VECTORS": plan.vectors} if plan.vectors else {})
    if rows:
        kernel = registry.get(plan.source, plan.name, defines)
        kernel((rows,), (plan.threads,), (x, weight, out, np.int32(width), np.float32(eps)), stream=stream)


def variants(dtype: np.dtype[Any], widths: Iterable[int]) -> Iterator[Variant]:
    """All that these functions may launch on rows of these widths, of which the norms are some."""
    for element in (_element(dtype), _element(None)):
        yield Variant.of(_V0, element)
        yield Variant.of(_V1, element)
    for width in widths:
        plan = _norm_plan(width)
        if plan.vectors:
            yield Variant.of(plan.source, _element(dtype) | {"VECTORS": plan.vectors})


def all_variants() -> Iterator[Variant]:
    """Everything that the tables list."""
    for bfloat16 in (0, 1):
        yield Variant.of(_V0, {"ELEM_BF16": bfloat16})
        yield Variant.of(_V1, {"ELEM_BF16": bfloat16})
        for vectors in range(1, _MOST_VECTORS + 1):
            yield Variant.of(_V1_RMS_NORM, {"ELEM_BF16": bfloat16, "VECTORS": vectors})


def _by_rows(
    registry: KernelRegistry,
    versions: tuple[str, str],
    dtype: np.dtype[Any] | None,
    width: int,
    rows: int,
    arrays: tuple[Any, ...],
    stream: Any,
    *scalars: np.generic,
) -> None:
    source, name = (_V1, versions[1]) if width % 8 == 0 else (_V0, versions[0])
    if rows:
        args = (*arrays, np.int32(width), *scalars)
        registry.get(source, name, _element(dtype))((rows,), (_THREADS,), args, stream=stream)


@dataclass(frozen=True, slots=True)
class _NormPlan:
    """`vectors` is 0 in version 0."""

    source: str
    name: str
    threads: int
    vectors: int


def _norm_plan(width: int) -> _NormPlan:
    groups = -(-width // 8)
    threads = min(_THREADS, -(-groups // 32) * 32)
    vectors = -(-groups // threads)
    if width % 8 or vectors > _MOST_VECTORS:
        return _NormPlan(_V0, "rms_norm_v0", _THREADS, 0)
    return _NormPlan(_V1_RMS_NORM, "rms_norm_v1", threads, vectors)


def _element(dtype: np.dtype[Any] | None) -> dict[str, int]:
    """None: nothing in the launch has the element type."""
    return {"ELEM_BF16": int(dtype is None or dtype.name == "bfloat16")}
