"""The Ops protocol: device operations that a model's forward pass is written in.

A model is a function that calls these in order (`engine/models/decoder.py`). A device either runs each call or
records the calls once and replays them every step; `Tensor` is whatever handle it hands out. Rows of
activations are the tokens of the step; weights are named as in the parameter table.
Read next: `engine/devices/cpu/program.py`, which records.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

Tensor = TypeVar("Tensor")


class Ops(Protocol[Tensor]):
    """Activations are [rows, width]; norms, residuals and softmax are float32 on every device."""

    def embedding(self, weight: str) -> Tensor:
        """Rows of `weight` for the step's token ids."""

    def rms_norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        """x / sqrt(mean(x**2) + eps) * weight, in the compute dtype."""

    def linear(self, x: Tensor, weights: Sequence[str], biases: Sequence[str] = ()) -> Tensor:
        """x . W.T + b with the weights' outputs side by side."""

    def add_linear(self, residual: Tensor, x: Tensor, weight: str, biases: Sequence[str] = ()) -> Tensor:
        """residual + linear(x, [weight], biases); consumes `residual`."""

    def rope_and_cache(self, qkv: Tensor, layer: int, norms: Sequence[str] = ()) -> Tensor:
        """Rotate queries and keys, write keys and values to the layer's pages; the queries, scaled.

        `norms`, [head_dim] each, are of an RMSNorm of each query head and of each key head before that.
        """

    def paged_attention(self, queries: Tensor, layer: int) -> Tensor:
        """Causal attention of each row over its sequence's pages, within the layer's window."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(left half) * right half."""

    def select_rows(self, x: Tensor) -> Tensor:
        """The rows whose logits the step needs."""
