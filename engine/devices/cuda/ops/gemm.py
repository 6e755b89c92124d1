"""Launches of cuda_src/gemm, and of cuBLAS: out = x . W.T with what follows the product.

    K not a multiple of 8 (int8: 16)        v0
    rows <= 16                              v1 small     reads W once
    else                                    v1 tiled     64 x 64, or 128 x 128 where that fills a GPU
    many rows, not batch invariant          cuBLAS       where it is installed, if nothing is fused to the product

Bits of an output depend on its row of x, its row of W and K: both versions 1 cut K at the same places, by K alone, and
add in the same order (`cuda_src/gemm/tile.cuh`), so a token's product is the same in whatever batch. Only cuBLAS,
which is therefore asked for, breaks that.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np

from engine.devices.cuda.registry import KernelRegistry, Variant

_V0, _SMALL, _TILED = "gemm/v0.cu", "gemm/v1_small.cu", "gemm/v1_tiled.cu"

_STAGES = 3
"""96 KiB of shared memory in the larger tile and in the small version: what sm_86, sm_89 and sm_120 have to give."""

_SMALL_ROWS = 16
_FULL_GPU = 128
"""Blocks of 128 x 128 from which the larger tile is taken; about the multiprocessors of a large GPU."""

_NULL = np.uint64(0)


class Epilogue(enum.IntEnum):
    """What becomes of the product; values are those of cuda_src/gemm/epilogue.cuh.

    STORE: out [rows, N] in the element type.
    STORE_F32: out [rows, N] float32.
    ADD_F32: added to out [rows, N] float32.
    SWIGLU: out [rows, N / 2] in the element type = silu(gate) * up; rows of W are 8 gates and 8 ups in turn.
    """

    STORE = 0
    STORE_F32 = 1
    ADD_F32 = 2
    SWIGLU = 3


class Weight(Protocol):
    """values [N, K] in the element type or int8 with scales f32 [N]; bias f32 [N]. What there is none of is None."""

    @property
    def values(self) -> Any: ...
    @property
    def scales(self) -> Any: ...
    @property
    def bias(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Launch:
    """A version and how to launch it."""

    source: str
    name: str
    defines: dict[str, int]
    grid: tuple[int, int]
    block: tuple[int, ...]
    shared_mem: int


def linear(
    registry: KernelRegistry, x: Any, weight: Weight, out: Any, rows: int, epilogue: Epilogue, *, stream: Any
) -> None:
    """out = epilogue(x . W.T * scales + bias): x [rows, K] bf16 or f16, C-contiguous as all arrays are."""
    n, k = weight.values.shape
    if rows == 0:
        return
    launch = plan(rows, n, k, x.dtype, epilogue, bias=weight.bias is not None, int8=weight.scales is not None)
    scales = _NULL if weight.scales is None else weight.scales
    bias = _NULL if weight.bias is None else weight.bias
    args = (x, weight.values, scales, bias, out, np.int32(rows), np.int32(n), np.int32(k))
    kernel = registry.get(launch.source, launch.name, launch.defines)
    kernel(launch.grid, launch.block, args, shared_mem=launch.shared_mem, stream=stream)


def plan(rows: int, n: int, k: int, dtype: np.dtype[Any], epilogue: Epilogue, *, bias: bool, int8: bool) -> Launch:
    """The version for a product [rows, k] . [n, k].T."""
    defines = _defines(dtype.name == "bfloat16", epilogue, bias, int8)
    if k % (16 if int8 else 8):
        return Launch(_V0, "gemm_v0", defines, (-(-n // 16), -(-rows // 16)), (16, 16), 0)
    weight_row = 64 if int8 else 128
    if rows <= _SMALL_ROWS:
        shared_mem = 8 * _STAGES * 16 * (128 + weight_row)
        return Launch(_SMALL, "gemm_v1_small", defines | {"STAGES": _STAGES}, (-(-n // 16), 1), (256,), shared_mem)
    tile = 128 if -(-rows // 128) * -(-n // 128) >= _FULL_GPU else 64
    defines |= _TILES[tile]
    threads = 32 * defines["WARPS_M"] * defines["WARPS_N"]
    shared_mem = _STAGES * tile * (128 + weight_row)
    return Launch(_TILED, "gemm_v1_tiled", defines, (-(-rows // tile), -(-n // tile)), (threads,), shared_mem)


def variants(dtype: np.dtype[Any], products: Iterable[tuple[int, Epilogue, bool, bool]]) -> Iterator[Variant]:
    """All that `linear` may launch for these products, each (K, epilogue, bias, int8)."""
    for k, epilogue, bias, int8 in products:
        defines = _defines(dtype.name == "bfloat16", epilogue, bias, int8)
        if k % (16 if int8 else 8):
            yield Variant.of(_V0, defines)
        else:
            yield from _fast_variants(defines)


def all_variants() -> Iterator[Variant]:
    """Everything that the table lists."""
    for bfloat16, epilogue, bias, int8 in product((False, True), Epilogue, (False, True), (False, True)):
        defines = _defines(bfloat16, epilogue, bias, int8)
        yield Variant.of(_V0, defines)
        yield from _fast_variants(defines)


_TILES = {
    64: {"TILE_M": 64, "TILE_N": 64, "WARPS_M": 2, "WARPS_N": 2, "STAGES": _STAGES},
    128: {"TILE_M": 128, "TILE_N": 128, "WARPS_M": 2, "WARPS_N": 4, "STAGES": _STAGES},
}


def _fast_variants(defines: dict[str, int]) -> Iterator[Variant]:
    yield Variant.of(_SMALL, defines | {"STAGES": _STAGES})
    for tile in _TILES.values():
        yield Variant.of(_TILED, defines | tile)


def _defines(bfloat16: bool, epilogue: Epilogue, bias: bool, int8: bool) -> dict[str, int]:
    return {"ELEM_BF16": int(bfloat16), "EPILOGUE": int(epilogue), "HAS_BIAS": int(bias), "WEIGHT_INT8": int(int8)}
