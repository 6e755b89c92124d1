"""Launches of cuda_src/gemm, and of cuBLAS: out = x . W.T with what follows the product.

    K not a multiple of 8 (int8: 16)        v0
    rows <= 16                              v1 small     reads W once
    else                                    v1 tiled     128 x 128 or 64 x 64 where that fills a GPU, else 64 x 32
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

_SMALL_STAGES = 3
"""96 KiB of shared memory, as in every tile below: what sm_86, sm_89 and sm_120 have to give."""

_SMALL_ROWS = 16
_FULL_GPU = 128
"""Blocks from which a tile is taken before a smaller one; about the multiprocessors of a large GPU."""

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
        shared_mem = 8 * _SMALL_STAGES * 16 * (128 + weight_row)
        defines |= {"STAGES": _SMALL_STAGES}
        return Launch(_SMALL, "gemm_v1_small", defines, (-(-n // 16), 1), (256,), shared_mem)
    tile, grid = _tile(rows, n)
    threads = 32 * tile["WARPS_M"] * tile["WARPS_N"]
    shared_mem = tile["STAGES"] * (tile["TILE_M"] * 128 + tile["TILE_N"] * weight_row)
    return Launch(_TILED, "gemm_v1_tiled", defines | tile, grid, (threads,), shared_mem)


def _tile(rows: int, n: int) -> tuple[dict[str, int], tuple[int, int]]:
    """The largest tile that is not half empty and whose blocks fill a GPU, else the smallest; and its blocks."""
    for tile in _TILES:
        grid = -(-rows // tile["TILE_M"]), -(-n // tile["TILE_N"])
        if rows > tile["TILE_M"] - 64 and grid[0] * grid[1] >= _FULL_GPU:
            break
    return tile, grid


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


_TILES = (
    {"TILE_M": 128, "TILE_N": 128, "WARPS_M": 2, "WARPS_N": 4, "STAGES": 3},
    {"TILE_M": 64, "TILE_N": 64, "WARPS_M": 2, "WARPS_N": 2, "STAGES": 6},
    {"TILE_M": 64, "TILE_N": 32, "WARPS_M": 4, "WARPS_N": 1, "STAGES": 8},
)
"""Fewer blocks need more stages, so that as many bytes are on their way: the best of 17 measured on an H200."""


def _fast_variants(defines: dict[str, int]) -> Iterator[Variant]:
    yield Variant.of(_SMALL, defines | {"STAGES": _SMALL_STAGES})
    for tile in _TILES:
        yield Variant.of(_TILED, defines | tile)


def _defines(bfloat16: bool, epilogue: Epilogue, bias: bool, int8: bool) -> dict[str, int]:
    return {"ELEM_BF16": int(bfloat16), "EPILOGUE": int(epilogue), "HAS_BIAS": int(bias), "WEIGHT_INT8": int(int8)}
