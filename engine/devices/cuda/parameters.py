"""Parameters: a model's weights on the GPU, loaded by walking its forward pass.

The pass itself says which weights are fused and in what order they are wanted, so nothing lists them twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.devices.cuda.weights import LinearWeight, Weights
from engine.models.decoder import hidden_states, logits
from loader.decoder import DecoderConfig


@dataclass(frozen=True, slots=True)
class Parameters:
    """Arrays by the (first) name of what they were made of.

    Attributes:
        tables: embedding and head, [vocab, hidden] in the compute dtype.
        norms: float32 [hidden], or [head_dim] of those of heads.
        linears: all products but the head's; gates and ups interleaved.
    """

    tables: dict[str, Any] = field(default_factory=dict)
    norms: dict[str, Any] = field(default_factory=dict)
    linears: dict[str, LinearWeight] = field(default_factory=dict)


def load_parameters(weights: Weights, decoder: DecoderConfig) -> Parameters:
    """Everything that the forward pass names; it has arrived when this returns."""
    parameters = Parameters()
    ops = _Loading(weights, parameters)
    logits(ops, decoder, hidden_states(ops, decoder))
    weights.finish()
    return parameters


def is_gate_up(weights: Sequence[str]) -> bool:
    """Whether a product is of gates and ups, which one kernel multiplies and joins."""
    return weights[0].endswith("gate_proj.weight")


def is_head(weights: Sequence[str]) -> bool:
    """Whether a product is with the vocabulary; its table may be the embedding's and is never int8."""
    return not weights[0].endswith("_proj.weight")


@dataclass(frozen=True, slots=True)
class _Loading:
    """Ops that compute nothing and load what they are given."""

    weights: Weights
    parameters: Parameters

    def embedding(self, weight: str) -> None:
        if weight not in self.parameters.tables:
            self.parameters.tables[weight] = self.weights.table(weight)

    def rms_norm(self, x: None, weight: str, eps: float) -> None:
        self.parameters.norms[weight] = self.weights.vector([weight])

    def linear(self, x: None, weights: Sequence[str], biases: Sequence[str] = ()) -> None:
        if is_head(weights):
            self.embedding(weights[0])
        else:
            self.parameters.linears[weights[0]] = self.weights.linear(weights, biases, is_gate_up(weights))

    def add_linear(self, residual: None, x: None, weight: str, biases: Sequence[str] = ()) -> None:
        self.linear(x, [weight], biases)

    def rope_and_cache(self, qkv: None, layer: int, norms: Sequence[str] = ()) -> None:
        for name in norms:
            self.rms_norm(None, name, 0.0)

    def paged_attention(self, queries: None, layer: int) -> None: ...

    def silu_and_mul(self, gate_up: None) -> None: ...

    def select_rows(self, x: None) -> None: ...
