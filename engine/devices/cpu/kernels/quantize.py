"""Activations rounded to int8 in groups: what `engine/devices/cpu/kernels/matmul_int8.py` multiplies."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,operator"

import numpy as np

from engine.devices.cpu.kernels.constants import GROUP, LANES
from engine.devices.cpu.kernels.jit import inner
from engine.devices.cpu.kernels.simd import (
    f32_pointer,
    i32_pointer,
    load,
    maximum,
    reduce_add,
    reduce_max,
    splat,
    store_low_bytes,
    u8_pointer,
)

_ROUNDING = np.float32(3 << 22)
"""Added to a number below 2**22 it rounds it to the nearest integer, ties to even, which its lowest bits then hold."""


@inner
def quantize_row(x, width, target):
    """Round float32 x[:width] at an address, zero up to the next 16, into an activation row at `target`."""
    source = f32_pointer(x)
    for i in range(0, width, GROUP):
        a, b = _load_or_zero(source, i, width), _load_or_zero(source, i + LANES, width)
        c = _load_or_zero(source, i + 2 * LANES, width)
        quantize_group(a, b, c, width, i // GROUP, target)


@inner
def _load_or_zero(source, i, width):
    return load(source, i) if i < width else splat(np.float32(0.0))


@inner
def quantize_group(a, b, c, width, g, target):
    """Round group `g` of a row of `width`, given as three vectors, into the activation row at `target`."""
    groups, shift = (width + GROUP - 1) // GROUP, splat(_ROUNDING)
    scales, corrections = f32_pointer(target + groups * GROUP), i32_pointer(target + groups * (GROUP + 4))
    largest = reduce_max(maximum(maximum(_magnitude(a), _magnitude(b)), _magnitude(c)))
    scale = largest / np.float32(127.0)
    inverse = splat(np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0))
    a, b, c = a * inverse + shift, b * inverse + shift, c * inverse + shift
    out, at = u8_pointer(target), g * GROUP
    store_low_bytes(out, at, a)
    store_low_bytes(out, at + LANES, b)
    store_low_bytes(out, at + 2 * LANES, c)
    total = reduce_add((a - shift) + (b - shift) + (c - shift))
    # Adds 0, or NaN where a value is not finite: an integer could not carry the fault any further.
    scales[g] = scale + (total - total)
    corrections[g] = np.int32(-128 * np.int64(total))


@inner
def _magnitude(x):
    return maximum(x, splat(np.float32(0.0)) - x)
