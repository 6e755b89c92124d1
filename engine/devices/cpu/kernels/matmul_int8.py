"""Matrix products of int8 groups on AVX512-VNNI: out[m, n] = x[m, k] . w[n, k], float32 out.

Activations are rounded to int8 in groups of 48 along k, weights in groups of 192, each group with its own scale
(absmax / 127): SmolLM2's perplexity grows by 0.08%; with activations in groups of 32 by 0.14%, of 64 by 0.27%. A
weight's scale is applied once for 48 products, an activation's once for 12. Per thread (EPYC) this does 369 to 395
GOP/s, as the minute is; bfloat16 222.

    weight      [n / 16, k / 48, 12, 16, 4] uint8, value + 128, then float16 scales [n / 16, k / 192, 16]
    activation  a row is int8 [k], float32 scales [k / 48], int32 [k / 48] of -128 * sum of the group

`vpdpbusd` multiplies unsigned by signed bytes, so the weight carries the offset, and what that adds, 128 * sum(x), is
a number per row and group that the sums start from. An output adds its groups in order whatever the tile, so a row is
bit-equal alone and among others. Read next: `engine/devices/cpu/kernels/matmul.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,operator"

from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped, unused-ignore]
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types

from engine.devices.cpu.kernels.codegen import (
    ZERO,
    Address,
    broadcast,
    call,
    fetch_outputs,
    finish,
    intrinsic,
    open_loop,
    prefetch,
)
from engine.devices.cpu.kernels.constants import GROUP, SPAN
from engine.devices.cpu.kernels.jit import inner, kernel

HAS_INT8_DOT = bool(llvm.get_host_cpu_features().get("avx512vnni"))

QUADS = GROUP // 4
"""Four inputs are one lane of a product; so many products make a group."""

_F32 = ir.VectorType(ir.FloatType(), 16)
_F16 = ir.VectorType(ir.HalfType(), 16)
_I32 = ir.IntType(32)
_I32S = ir.VectorType(_I32, 16)
_I64 = ir.IntType(64)
_GROUP_BYTES = GROUP * 16
_SCALE_BYTES = 32


def _make_tile(rows: int, blocks: int) -> Any:
    """An intrinsic that computes `rows` x `blocks` * 16 outputs, sums held in registers over all groups.

    Four rows may be followed by others that fetch the next blocks, so they fetch one; less than four fetch them all.
    """
    fetched = 1 if rows == 4 else blocks

    @intrinsic
    def tile(typingctx, x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead):
        """Addresses x, w, scales, out and bias (or 0), strides in bytes, adds to out, a block to fetch meanwhile."""

        def codegen(context, builder, signature, args):
            x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead = args
            fetch_outputs(builder, rows, blocks, out, out_stride)
            sources = [Address(builder, x).at((x_stride, i)) for i in range(rows)]
            weights = [Address(builder, w).at((groups, j * _GROUP_BYTES)) for j in range(blocks)]
            supers = builder.sdiv(builder.add(groups, ir.Constant(_I64, SPAN - 1)), ir.Constant(_I64, SPAN))
            weight_scales = [Address(builder, scales).at((supers, j * _SCALE_BYTES)) for j in range(blocks)]
            zeros = [ZERO] * (rows * blocks)
            sums, span, close_span = open_loop(builder, supers, zeros)
            first = builder.mul(span, ir.Constant(_I64, SPAN))
            left = builder.sub(groups, first)
            short = builder.icmp_signed("<", left, ir.Constant(_I64, SPAN))
            count = builder.select(short, left, ir.Constant(_I64, SPAN))
            terms, index, close = open_loop(builder, count, zeros)
            g = builder.add(first, index)
            following = [Address(builder, ahead).at((groups, j * _GROUP_BYTES)) for j in range(fetched)]
            products = _dot_group(builder, sources, weights, groups, g, following)
            grown = []
            for i, source in enumerate(sources):
                scale = broadcast(builder, source.at((groups, GROUP), (g, 4)).load(ir.FloatType(), 4))
                for place in range(i * blocks, (i + 1) * blocks):
                    product = builder.sitofp(products[place], _F32)
                    grown.append(call(builder, "llvm.fma.v16f32", product, scale, terms[place]))
            close(grown)
            vectors = [builder.fpext(s.at((span, _SCALE_BYTES)).load(_F16, 32), _F32) for s in weight_scales]
            close_span(
                [call(builder, "llvm.fma.v16f32", term, vectors[i % blocks], sums[i]) for i, term in enumerate(terms)]
            )
            finish(builder, sums, blocks, out, out_stride, bias, adds)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return tile


def _dot_group(
    builder: Any, sources: list[Any], weights: list[Any], groups: Any, g: Any, following: list[Any]
) -> list[Any]:
    """Integer products of group `g`, row by row."""
    products = []
    for source in sources:
        correction = source.at((groups, GROUP + 4), (g, 4)).load(_I32, 4)
        products += [broadcast(builder, correction)] * len(weights)
    for quad in range(QUADS):
        for ahead in following:
            prefetch(builder, ahead.at((g, _GROUP_BYTES), (ir.Constant(_I64, 64), quad)).address, level=2)
        offset = ir.Constant(_I64, 64 * quad)
        vectors = [w.at((g, _GROUP_BYTES), (offset, 1)).load(_I32S, 64) for w in weights]
        for i, source in enumerate(sources):
            four = broadcast(builder, source.at((g, GROUP), (ir.Constant(_I64, 4 * quad), 1)).load(_I32, 4))
            for j, vector in enumerate(vectors):
                place = i * len(weights) + j
                products[place] = call(builder, "llvm.x86.avx512.vpdpbusd.512", products[place], vector, four)
    return products


_4x3, _3x3, _2x3, _1x3 = (_make_tile(rows, 3) for rows in (4, 3, 2, 1))
_1x6 = _make_tile(1, 6)
_4x1, _3x1, _2x1, _1x1 = (_make_tile(rows, 1) for rows in (4, 3, 2, 1))


@inner
def _tile(rows, blocks, x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead):
    """One to four rows by three blocks of columns or one, or one row by six."""
    if blocks == 6:
        _1x6(x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead)
    elif blocks == 3:
        if rows == 4:
            _4x3(x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead)
        elif rows == 3:
            _3x3(x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead)
        elif rows == 2:
            _2x3(x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead)
        else:
            _1x3(x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead)
    elif rows == 4:
        _4x1(x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead)
    elif rows == 3:
        _3x1(x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead)
    elif rows == 2:
        _2x1(x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead)
    else:
        _1x1(x, x_stride, w, scales, groups, out, out_stride, bias, adds, ahead)


@inner
def _int8_panel(x, x_stride, w, scales, groups, out, out_stride, rows, blocks, bias, adds):
    """out[rows, blocks * 16] = x . w + bias (+ out); strides in bytes.

    While blocks are multiplied, the first strips of rows fetch the next ones' weights.
    """
    block_bytes = groups * _GROUP_BYTES
    scale_bytes = (groups + SPAN - 1) // SPAN * _SCALE_BYTES
    block = 0
    while block < blocks:
        step = 6 if rows == 1 and blocks - block >= 6 else 3 if blocks - block >= 3 else 1
        weight, scale, target = w + block * block_bytes, scales + block * scale_bytes, out + block * 64
        shift = bias + block * 64 if bias != 0 else 0
        for row in range(0, rows, 4):
            ahead = weight + (step + row // 4) * block_bytes if row < 4 * step else weight
            source, place = x + row * x_stride, target + row * out_stride
            _tile(
                min(4, rows - row), step, source, x_stride, weight, scale, groups, place, out_stride, shift, adds, ahead
            )
        block += step


@inner
def _never(x, x_stride, w, scales, groups, out, out_stride, rows, blocks, bias, adds):
    """Stands where the processor lacks the instruction; no weight is packed for it then."""


int8_panel = _int8_panel if HAS_INT8_DOT else _never


@kernel
def pack_int8(weight, packed, scales):
    """Quantize and pack [n, k] float32 into uint8 [blocks, groups, 12, 16, 4], by scales [blocks, spans, 16].

    Rows beyond n are zero. Scales are float32 here; the caller stores them as float16, rounded before this call.
    """
    n, k = weight.shape
    for block in range(packed.shape[0]):
        for g in range(packed.shape[1]):
            for lane in range(16):
                row = block * 16 + lane
                scale = scales[block, g // SPAN, lane]
                for i in range(GROUP):
                    column = g * GROUP + i
                    value = np.float32(0.0)
                    if row < n and column < k and scale > 0.0:
                        value = np.rint(weight[row, column] / scale)
                    packed[block, g, i // 4, lane, i % 4] = np.uint8(max(-127, min(127, np.int64(value))) + 128)
