"""The parameter table: every parameter a decoder has, by its canonical (Hugging Face) name."""

from loader.decoder import DecoderConfig

Shape = tuple[int, ...]


def parameter_table(decoder: DecoderConfig) -> dict[str, Shape]:
    """Shape of each parameter, in the order a forward pass needs them.

    Linear weights are [out, in]. `lm_head.weight` is absent when embeddings are tied.
    """
    vocab, hidden = decoder.vocab_size, decoder.hidden_size
    table: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(decoder.num_hidden_layers):
        for name, shape in _layer_table(decoder).items():
            table[f"model.layers.{layer}.{name}"] = shape
    table["model.norm.weight"] = (hidden,)
    if not decoder.tie_word_embeddings:
        table["lm_head.weight"] = (vocab, hidden)
    return table


def parameter_factor(decoder: DecoderConfig, name: str) -> float:
    """What a parameter is multiplied by when it is read, so that a forward pass needs no factors of its own."""
    module = name.rsplit(".", 2)[-2]
    if module in ("o_proj", "down_proj"):
        return decoder.residual_factor
    return decoder.logit_factor if name == "model.norm.weight" else 1.0


def _layer_table(decoder: DecoderConfig) -> dict[str, Shape]:
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    queries = decoder.num_attention_heads * decoder.head_dim
    keys = decoder.num_key_value_heads * decoder.head_dim
    table: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    table |= _linear("self_attn.q_proj", (queries, hidden), decoder.attention_bias)
    table |= _linear("self_attn.k_proj", (keys, hidden), decoder.attention_bias)
    table |= _linear("self_attn.v_proj", (keys, hidden), decoder.attention_bias)
    if decoder.qk_norm:
        table |= {f"self_attn.{name}_norm.weight": (decoder.head_dim,) for name in ("q", "k")}
    table |= _linear("self_attn.o_proj", (hidden, queries), decoder.attention_output_bias)
    table["post_attention_layernorm.weight"] = (hidden,)
    table |= _linear("mlp.gate_proj", (inner, hidden), decoder.mlp_bias)
    table |= _linear("mlp.up_proj", (inner, hidden), decoder.mlp_bias)
    table |= _linear("mlp.down_proj", (hidden, inner), decoder.mlp_bias)
    return table


def _linear(name: str, shape: Shape, bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})
