"""The Ops protocol in NumPy float64, one sequence at a time, without pages: what the decoder means."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.models.decoder import hidden_states, logits
from loader.decoder import DecoderConfig
from loader.rope import inverse_frequencies
from loader.weights import WeightSource

Array = NDArray[np.float64]


def numpy_logits(decoder: DecoderConfig, weights: WeightSource, ids: Sequence[int]) -> Array:
    """[len(ids), vocab_size] by `engine/models/decoder.py` over NumpyOps."""
    ops = NumpyOps(decoder, weights, ids)
    return logits(ops, decoder, hidden_states(ops, decoder))


class NumpyOps:
    def __init__(self, decoder: DecoderConfig, weights: WeightSource, ids: Sequence[int]) -> None:
        self.decoder, self.weights, self.ids = decoder, weights, list(ids)
        self.cache: dict[int, tuple[Array, Array]] = {}
        angles = np.arange(len(self.ids))[:, None] * inverse_frequencies(decoder.rope, decoder.head_dim)
        self.turns = np.exp(1j * angles) * decoder.rope.attention_factor

    def get(self, name: str) -> Array:
        return self.weights.tensor(name).astype(np.float64)

    def embedding(self, weight: str) -> Array:
        return self.get(weight)[self.ids]

    def select_rows(self, x: Array) -> Array:
        return x

    def rms_norm(self, x: Array, weight: str, eps: float) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.get(weight)

    def linear(self, x: Array, weights: Sequence[str], biases: Sequence[str] = ()) -> Array:
        y = x @ np.concatenate([self.get(name) for name in weights]).T
        return y + np.concatenate([self.get(name) for name in biases]) if biases else y

    def add_linear(self, residual: Array, x: Array, weight: str, biases: Sequence[str] = ()) -> Array:
        return residual + self.linear(x, [weight], biases)

    def silu_and_mul(self, gate_up: Array) -> Array:
        gate, up = np.split(gate_up, 2, axis=-1)
        return gate / (1 + np.exp(-gate)) * up

    def rope_and_cache(self, qkv: Array, layer: int, norms: Sequence[str] = ()) -> Array:
        config = self.decoder
        heads = qkv.reshape(len(qkv), -1, config.head_dim)
        q, k, v = np.split(heads, [config.num_attention_heads, -config.num_key_value_heads], axis=1)
        if norms:
            q, k = (self.rms_norm(x, name, config.rms_norm_eps) for x, name in zip((q, k), norms, strict=True))
        if config.rotary_layers[layer]:
            q, k = self.rotate(q), self.rotate(k)
        self.cache[layer] = k, v
        return q * config.attention_scale

    def rotate(self, x: Array) -> Array:
        half = x.shape[-1] // 2
        z = (x[..., :half] + 1j * x[..., half:]) * self.turns[:, None]
        return np.concatenate((z.real, z.imag), -1)

    def paged_attention(self, queries: Array, layer: int) -> Array:
        keys, values = self.cache[layer]
        group = self.decoder.num_attention_heads // self.decoder.num_key_value_heads
        window = self.decoder.layer_windows[layer] or len(self.ids)
        distance = np.subtract.outer(np.arange(len(self.ids)), np.arange(len(self.ids)))
        hidden = (distance < 0) | (distance >= window)
        out = np.empty_like(queries)
        for head in range(queries.shape[1]):
            scores = np.where(hidden, -np.inf, queries[:, head] @ keys[:, head // group].T)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = shares / shares.sum(-1, keepdims=True) @ values[:, head // group]
        return out.reshape(len(queries), -1)
