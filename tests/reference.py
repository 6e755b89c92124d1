"""A naive forward pass of a Llama-like decoder in NumPy float64: the plain formula, one sequence, no cache.

Written from the papers, apart from the engine and from `loader.rope`, so that tests compare
two implementations. It reproduces the golden files (tests/loader/test_golden.py).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loader.decoder import DecoderConfig, RopeConfig
from loader.weights import WeightSource

Array = NDArray[np.float64]


def reference_logits(
    decoder: DecoderConfig,
    weights: WeightSource,
    token_ids: Sequence[int],
) -> Array:
    """Logits after each token: [n, vocab_size] float64."""

    def get(name: str) -> Array:
        return weights.tensor(name).astype(np.float64)

    def linear(x: Array, name: str) -> Array:
        y = x @ get(f"{name}.weight").T
        return y + get(f"{name}.bias") if f"{name}.bias" in weights.names else y

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + decoder.rms_norm_eps) * get(f"{name}.weight")

    speeds = reference_frequencies(decoder.rope, decoder.head_dim)
    embedding = weights.tensor("model.embed_tokens.weight")
    x = embedding[list(token_ids)].astype(np.float64)
    for layer in range(decoder.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        y = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (linear(y, f"{prefix}.self_attn.{p}_proj") for p in "qkv")
        if decoder.qk_norm:
            q, k = (
                norm(x.reshape(len(x), -1, decoder.head_dim), f"{prefix}.self_attn.{p}_norm").reshape(len(x), -1)
                for x, p in ((q, "q"), (k, "k"))
            )
        x = x + linear(_attention(decoder, layer, q, k, v, speeds), f"{prefix}.self_attn.o_proj")
        y = norm(x, f"{prefix}.post_attention_layernorm")
        gate, up = linear(y, f"{prefix}.mlp.gate_proj"), linear(y, f"{prefix}.mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{prefix}.mlp.down_proj")
    x = norm(x, "model.norm")
    head = "model.embed_tokens" if decoder.tie_word_embeddings else "lm_head"
    return linear(x, head)


def reference_greedy(decoder: DecoderConfig, weights: WeightSource, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` most likely tokens after `prompt`, each by a forward pass of its own."""
    ids = [int(i) for i in prompt]
    for _ in range(count):
        ids.append(int(reference_logits(decoder, weights, ids)[-1].argmax()))
    return ids[len(prompt) :]


def _attention(decoder: DecoderConfig, layer: int, q: Array, k: Array, v: Array, speeds: Array) -> Array:
    n, size = len(q), decoder.head_dim
    q, k, v = (a.reshape(n, -1, size) for a in (q, k, v))
    if decoder.rotary_layers[layer]:
        q, k = (_rotate(x, speeds, decoder.rope.attention_factor) for x in (q, k))
    group = decoder.num_attention_heads // decoder.num_key_value_heads
    behind = np.subtract.outer(np.arange(n), np.arange(n))
    unseen = (behind < 0) | (behind >= (decoder.layer_windows[layer] or n))
    out = np.empty_like(q)
    for head in range(decoder.num_attention_heads):
        scores = q[:, head] @ k[:, head // group].T * decoder.attention_scale
        scores[unseen] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head // group]
    return out.reshape(n, -1)


def _rotate(x: Array, speeds: Array, magnitude: float) -> Array:
    """[n, heads, head_dim], half-split pairs, as complex numbers."""
    half = x.shape[-1] // 2
    turns = np.exp(1j * np.arange(len(x))[:, None] * speeds) * magnitude
    z = (x[..., :half] + 1j * x[..., half:]) * turns[:, None]
    return np.concatenate((z.real, z.imag), -1)


def reference_frequencies(rope: RopeConfig, head_dim: int) -> Array:
    """[head_dim / 2] radians per position."""
    return np.array([_frequency(rope, head_dim, pair) for pair in range(head_dim // 2)])


def _frequency(rope: RopeConfig, head_dim: int, pair: int) -> float:
    """Radians per position of one pair, case by case as the papers and Meta's code put it."""
    plain = 1.0 / rope.theta ** (2 * pair / head_dim)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    length = rope.original_max_position_embeddings
    if rope.kind == "llama3":
        wave = 2 * math.pi / plain
        if wave < length / rope.high_freq_factor:
            return plain
        if wave > length / rope.low_freq_factor:
            return plain / rope.factor
        smooth = (length / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return (1 - smooth) * plain / rope.factor + smooth * plain
    low = head_dim * math.log(length / (rope.beta_fast * 2 * math.pi)) / (2 * math.log(rope.theta))
    high = head_dim * math.log(length / (rope.beta_slow * 2 * math.pi)) / (2 * math.log(rope.theta))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (pair - low) / (high - low if high != low else 0.001)
    keep = 1 - min(max(ramp, 0.0), 1.0)
    return plain / rope.factor * (1 - keep) + plain * keep
