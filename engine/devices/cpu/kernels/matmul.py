"""Matrix products on AVX512-BF16: out[m, n] = x[m, k] . w[n, k], bfloat16 in, float32 out.

NumKong's product reads a weight at 10 GB/s per thread for one row and reaches 112 GFLOP/s for 32, this one 23 and
188 (EPYC, one thread; 218 against 165 at 480 rows): it keeps a tile of sums in registers, and one row costs no
more than reading the weight. The weight is packed as [n / 16, k / 2, 16, 2], so one vector is 16 outputs x 2 inputs
and a pair of inputs is broadcast against it (`vdpbf16ps`). Every output sums its pairs in order whatever the tile, so
a row is bit-equal alone and among others. The instruction treats denormals as zero.
Read next: `engine/devices/cpu/kernels/linear.py`, `engine/devices/cpu/products.py` (packing).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types

from engine.devices.cpu.kernels.codegen import (
    BLOCK_COLUMNS,
    ZERO,
    Address,
    broadcast,
    dot_pairs,
    fetch_outputs,
    finish,
    intrinsic,
    open_loop,
    prefetch,
)
from engine.devices.cpu.kernels.jit import inner
from engine.devices.cpu.kernels.simd import HAS_BFLOAT16_DOT

_F32 = ir.VectorType(ir.FloatType(), BLOCK_COLUMNS)
_PAIRS = ir.VectorType(ir.IntType(32), BLOCK_COLUMNS)
_I32 = ir.IntType(32)


def _make_tile(rows: int, blocks: int) -> Any:
    """An intrinsic that computes `rows` x `blocks` * 16 outputs, sums held in registers over all of k."""

    @intrinsic
    def tile(typingctx, x, x_stride, w, w_stride, out, out_stride, pairs, bias, adds, ahead):
        """Addresses x, w, out and bias (or 0), strides in bytes (w's per block of columns), k / 2, adds to out, a
        block of columns to fetch meanwhile."""

        def codegen(context, builder, signature, args):
            x, x_stride, w, w_stride, out, out_stride, pairs, bias, adds, ahead = args
            fetch_outputs(builder, rows, blocks, out, out_stride)
            sums, k, close = open_loop(builder, pairs, [ZERO] * (rows * blocks))
            source, weights = Address(builder, x), Address(builder, w)
            vectors = [weights.at((w_stride, j), (k, 64)).load(_PAIRS, 64) for j in range(blocks)]
            prefetch(builder, Address(builder, ahead).at((k, 64)).address, level=2)
            grown = []
            for i in range(rows):
                pair = broadcast(builder, source.at((x_stride, i), (k, 4)).load(_I32, 4))
                grown += [dot_pairs(builder, sums[i * blocks + j], pair, vectors[j]) for j in range(blocks)]
            close(grown)
            finish(builder, sums, blocks, out, out_stride, bias, adds)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return tile


_8x3, _8x1 = _make_tile(8, 3), _make_tile(8, 1)
_4x6, _4x1 = _make_tile(4, 6), _make_tile(4, 1)
_1x8, _1x1 = _make_tile(1, 8), _make_tile(1, 1)


@inner
def _bfloat16_panel(x, x_stride, w, w_stride, out, out_stride, rows, blocks, pairs, bias, adds):
    """out[rows, blocks * 16] = x . w + bias (+ out); strides in bytes, w's per block of columns.

    Rows are done eight, then four, then one at a time, with as many blocks of columns as registers hold. While a block
    is multiplied, the first strips of eight fetch the next one's weights.
    """
    eights, fours = rows // 8 * 8, rows // 4 * 4
    block = 0
    while block < blocks and eights > 0:
        step = 3 if blocks - block >= 3 else 1
        weights, target = w + block * w_stride, out + block * 64
        shift = bias + block * 64 if bias != 0 else 0
        for row in range(0, eights, 8):
            source, place = x + row * x_stride, target + row * out_stride
            ahead = weights + (step + row // 8) * w_stride if row < 8 * step else weights
            if step == 3:
                _8x3(source, x_stride, weights, w_stride, place, out_stride, pairs, shift, adds, ahead)
            else:
                _8x1(source, x_stride, weights, w_stride, place, out_stride, pairs, shift, adds, ahead)
        block += step
    block = 0
    while block < blocks and eights < fours:
        step = 6 if blocks - block >= 6 else 1
        source, place = x + eights * x_stride, out + block * 64 + eights * out_stride
        weights, shift = w + block * w_stride, bias + block * 64 if bias != 0 else 0
        if step == 6:
            _4x6(source, x_stride, weights, w_stride, place, out_stride, pairs, shift, adds, weights)
        else:
            _4x1(source, x_stride, weights, w_stride, place, out_stride, pairs, shift, adds, weights)
        block += step
    for row in range(fours, rows):
        block = 0
        while block < blocks:
            step = 8 if blocks - block >= 8 else 1
            source, place = x + row * x_stride, out + block * 64 + row * out_stride
            weights, shift = w + block * w_stride, bias + block * 64 if bias != 0 else 0
            if step == 8:
                _1x8(source, x_stride, weights, w_stride, place, out_stride, pairs, shift, adds, weights)
            else:
                _1x1(source, x_stride, weights, w_stride, place, out_stride, pairs, shift, adds, weights)
            block += step


@inner
def _never(x, x_stride, w, w_stride, out, out_stride, rows, blocks, pairs, bias, adds):
    """Stands where the processor lacks the instruction; no weight is packed for it then."""


bfloat16_panel = _bfloat16_panel if HAS_BFLOAT16_DOT else _never
