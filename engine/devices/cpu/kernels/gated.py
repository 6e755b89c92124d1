"""Gates times ups: silu(gate) * up, of a row that holds both."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import math

import numpy as np

from engine.devices.cpu.kernels.constants import GROUP, LANES
from engine.devices.cpu.kernels.jit import entry, inner
from engine.devices.cpu.kernels.quantize import quantize_group
from engine.devices.cpu.kernels.simd import (
    exp,
    exp2,
    f32_pointer,
    i64_pointer,
    keep_lanes,
    load,
    pad,
    splat,
    store,
    store_narrow,
    u16_pointer,
)

_MINUS_LOG2_E = np.float32(-1 / math.log(2))


@inner
def gated(x, gate, distance):
    """silu(gate) * up to 4e-6, for results that are rounded."""
    g = load(x, gate)
    return g / (splat(np.float32(1.0)) + exp2(g * splat(_MINUS_LOG2_E))) * load(x, gate + distance)


@inner
def silu_and_mul(op, begin, end):
    """op: gate_up, out, width, out's code as in `rms_norm`, its stride. gate_up rows hold `width` gates, then ups."""
    x, width, stride = f32_pointer(op[1]), op[3], pad(2 * op[3])
    for row in range(begin, end):
        gates = row * stride
        if op[4] == 2:
            for i in range(0, width, GROUP):
                a, b = _silu(x, gates, i, width), _silu(x, gates, i + LANES, width)
                c = _silu(x, gates, i + 2 * LANES, width)
                quantize_group(a, b, c, width, i // GROUP, op[2] + row * op[5])
        elif op[4] == 1:
            for i in range(0, width, LANES):
                store_narrow(u16_pointer(op[2]), row * pad(width) + i, _silu(x, gates, i, width))
        else:
            _silu_float32(x, gates, f32_pointer(op[2]), row * pad(width), width)


@inner
def _silu(x, gates, i, width):
    """Vector i of silu(gate) * up of a row whose gates begin at `gates`; zero beyond the width."""
    if i >= width:
        return splat(np.float32(0.0))
    value = gated(x, gates + i, width)
    return value if i + LANES <= width else keep_lanes(value, 0, width - i, splat(np.float32(0.0)))


@inner
def _silu_float32(x, gates, out, target, width):
    one, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
    for i in range(0, width, LANES):
        gate = load(x, gates + i)
        value = gate / (one + exp(zero - gate)) * load(x, gates + width + i)
        store(out, target + i, keep_lanes(value, 0, width - i, zero))


@entry
def silu_and_mul_parts(address, rows, items, begin, end, parts, thread):
    silu_and_mul(i64_pointer(address), rows * begin // parts, rows * end // parts)
