"""The decoder described as data: one config that every supported architecture maps to.

`loader/architectures.py` builds it from config.json; `loader/parameters.py` derives the
parameter table from it; `engine/models/decoder.py` runs it. Field names follow the
Hugging Face config where one exists.
"""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. Fields beyond `kind` and `theta` are read only by the kinds named.

    Attributes:
        factor: linear, llama3, yarn.
        low_freq_factor, high_freq_factor: llama3.
        original_max_position_embeddings: llama3, yarn.
        beta_fast, beta_slow, attention_factor, truncate: yarn.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A pre-norm decoder with rotary positions, grouped-query attention and a gated MLP.

    Attributes:
        architecture: name from config.json, e.g. "LlamaForCausalLM".
        dtype: the checkpoint's dtype, "bfloat16", "float16" or "float32".
        layer_windows: [num_hidden_layers] sliding window of each layer, None is full attention.
        attention_bias: of queries, keys and values; `attention_output_bias` is of what comes behind attention.
        qk_norm: every head of queries and of keys has an RMSNorm before it is rotated.
        rotary_layers: [num_hidden_layers] whether queries and keys are rotated there at all.
        attention_scale: multiplies q . k.
        residual_factor: of what attention and MLP add to the residual stream.
        logit_factor: of the logits.
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_scale: float
    residual_factor: float
    logit_factor: float
    layer_windows: tuple[int | None, ...]
    rotary_layers: tuple[bool, ...]
    rope: RopeConfig
