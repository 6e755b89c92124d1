"""The decoder's forward pass, written once over device ops.

`hidden_states` runs over all tokens of a step, `logits` only over the rows that need them.
Parameter names are those of `loader/parameters.py`.
"""

from engine.models.ops import Ops, Tensor
from loader.decoder import DecoderConfig


def hidden_states(ops: Ops[Tensor], config: DecoderConfig) -> Tensor:
    """[tokens, hidden] after the last layer, before the final norm."""
    hidden = ops.embedding("model.embed_tokens.weight")
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        hidden = _attention(ops, config, hidden, layer, prefix)
        hidden = _mlp(ops, config, hidden, prefix)
    return hidden


def logits(ops: Ops[Tensor], config: DecoderConfig, hidden: Tensor) -> Tensor:
    """[selected rows, vocab]."""
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    selected = ops.select_rows(hidden)
    return ops.linear(ops.rms_norm(selected, "model.norm.weight", config.rms_norm_eps), [head])


def _attention(ops: Ops[Tensor], config: DecoderConfig, hidden: Tensor, layer: int, prefix: str) -> Tensor:
    x = ops.rms_norm(hidden, f"{prefix}.input_layernorm.weight", config.rms_norm_eps)
    names, output = [f"{prefix}.self_attn.{name}_proj" for name in ("q", "k", "v")], f"{prefix}.self_attn.o_proj"
    biases = [f"{name}.bias" for name in names] if config.attention_bias else []
    qkv = ops.linear(x, [f"{name}.weight" for name in names], biases)
    norms = [f"{prefix}.self_attn.{name}_norm.weight" for name in ("q", "k")] if config.qk_norm else []
    attended = ops.paged_attention(ops.rope_and_cache(qkv, layer, norms), layer)
    return ops.add_linear(
        hidden, attended, f"{output}.weight", [f"{output}.bias"] if config.attention_output_bias else []
    )


def _mlp(ops: Ops[Tensor], config: DecoderConfig, hidden: Tensor, prefix: str) -> Tensor:
    x = ops.rms_norm(hidden, f"{prefix}.post_attention_layernorm.weight", config.rms_norm_eps)
    names = [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up", "down")]
    biases = [f"{name}.bias" for name in names] if config.mlp_bias else []
    gate_up = ops.linear(x, [f"{name}.weight" for name in names[:2]], biases[:2])
    return ops.add_linear(hidden, ops.silu_and_mul(gate_up), f"{names[2]}.weight", biases[2:])
