"""Sampling in plain NumPy float64, written from the definitions: sorted arrays, no shortcuts."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def kept_tokens(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that pass min-p, then top-k, then top-p over what is left."""
    z = (logits - logits.max()) / temperature
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    order = [i for i in order if z[i] > -np.inf and np.exp(z[i]) >= min_p * (1 - 1e-6)]
    if top_k > 0:
        order = order[:top_k]
    mass = np.cumsum(np.exp(z[order]))
    if top_p < 1.0:
        order = order[: int(np.searchsorted(mass, (top_p - 1e-6) * mass[-1])) + 1]
    return set(order)


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 with Python's integers."""
    (a, b, c, d), (k0, k1), mask = counter, key, 0xFFFFFFFF
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k0, q & mask, (p >> 32) ^ d ^ k1, p & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [a, b, c, d]


def gumbel_noise(seed: int, position: int, choice: int, vocab: int) -> Array:
    """Noise of every token, by the documented counter."""
    key = seed & 0xFFFFFFFF, seed >> 32
    words = [w for quad in range(-(-vocab // 4)) for w in philox_words((quad, position, choice, 0), key)]
    v = (np.array(words[:vocab], np.float64) + 0.5) / 2**32
    return np.asarray(-np.log(-np.log1p(-v)))


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
