"""Rotary frequencies of each RoPE kind, in float64.

Formulas as in transformers' `modeling_rope_utils.py`. A head of `head_dim` is rotated in the half-split layout: pair
`i` is (x[i], x[i + head_dim / 2]) and turns by `position * inverse_frequencies[i]`; cosine and sine
are multiplied by `RopeConfig.attention_factor`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from loader.decoder import RopeConfig

Float64Array = NDArray[np.float64]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float64Array:
    """Radians per position of each pair: [head_dim / 2] float64, fastest first."""
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope, head_dim)


def _llama3(plain: Float64Array, rope: RopeConfig) -> Float64Array:
    """Waves shorter than original/high stay, longer than original/low are stretched, blended between (Llama 3.1)."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / rope.factor)


def _yarn(plain: Float64Array, rope: RopeConfig, head_dim: int) -> Float64Array:
    """NTK-by-parts: a linear ramp over pairs between beta_fast and beta_slow turns (arXiv 2309.00071, 3.2)."""

    def pair_that_turns(turns: float) -> float:
        positions = rope.original_max_position_embeddings
        return head_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretch: Float64Array = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return plain * (1.0 - stretch + stretch / rope.factor)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor on cosine and sine when the config gives none (arXiv 2309.00071, 3.4; mscale is DeepSeek's)."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)
