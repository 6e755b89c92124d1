"""config.json -> DecoderConfig: a table of architectures, and a refusal of everything it does not cover.

A field is either read here, known not to change the forward pass (`HARMLESS`), or harmless
at the value given (`NEUTRAL`); any other field that is not null is refused by name, because a
field the engine does not know may change the math without a sound.
Read next: `loader/decoder.py` (the result), `loader/rope_config.py` (the rotary part).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from loader.decoder import DecoderConfig
from loader.errors import CheckpointError, shown
from loader.fields import Fields
from loader.rope_config import read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What one name in `architectures` implies beyond its config.json.

    Attributes:
        model_type: the only value of the field `model_type`.
        activations: values of `hidden_act` it may have.
        defaults: transformers' value of each field that config.json may leave out.
        neutral: architecture-specific fields, with the values at which they do nothing.
        has_windows: `sliding_window` and its like are read; else one that is switched on is refused.
        attention_biases: of queries, keys and values, and of the output; None where `attention_bias` says it for both.
        qk_norm: see DecoderConfig.
        ignored: fields that mean something only together with others that are refused.
    """

    model_type: str
    activations: tuple[str, ...]
    defaults: Mapping[str, Any]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    has_windows: bool = False
    attention_biases: tuple[bool, bool] | None = None
    qk_norm: bool = False
    ignored: frozenset[str] = frozenset()


_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_QWEN = _COMMON | {
    "max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        model_type="llama",
        activations=("silu",),
        defaults=_COMMON | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
        # SmolLM2's conversion left the last two behind.
        neutral={"rope_interleaved": (False,), "is_llama_config": (True,)},
    ),
    "GraniteForCausalLM": Architecture(
        model_type="granite",
        activations=("silu",),
        defaults=_COMMON
        | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False, "attention_multiplier": 1.0}
        | {"residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0},
    ),
    "MistralForCausalLM": Architecture(
        model_type="mistral",
        activations=("silu",),
        defaults=_COMMON | {"max_position_embeddings": 131072, "sliding_window": 4096},
        neutral={"attention_bias": (False,), "mlp_bias": (False,)},
        has_windows=True,
        attention_biases=(False, False),
    ),
    "Phi3ForCausalLM": Architecture(
        model_type="phi3",
        activations=("silu",),
        defaults=_COMMON | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        neutral={"attention_bias": (False,), "mlp_bias": (False,)},
        has_windows=True,
        attention_biases=(False, False),
        ignored=frozenset({"original_max_position_embeddings"}),
    ),
    "Qwen2ForCausalLM": Architecture(
        model_type="qwen2",
        activations=("silu",),
        defaults=_QWEN,
        neutral={"attention_bias": (True,), "mlp_bias": (False,)},
        has_windows=True,
        attention_biases=(True, False),
    ),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        activations=("silu",),
        defaults=_QWEN | {"head_dim": 128, "attention_bias": False},
        neutral={"mlp_bias": (False,)},
        has_windows=True,
        qk_norm=True,
    ),
    "SmolLM3ForCausalLM": Architecture(
        model_type="smollm3",
        activations=("silu",),
        defaults=_QWEN
        | {"rope_theta": 2e6, "tie_word_embeddings": True, "attention_bias": False, "no_rope_layer_interval": 4},
        has_windows=True,
    ),
}

# Fields that never change the forward pass.
_BOOKKEEPING = {
    "_name_or_path", "_commit_hash", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
    "_from_model_config",
    "transformers_version", "transformers.js_config", "architectures", "model_type", "auto_map", "tokenizer_class",
    "max_sequence_length", "unsloth_version", "unsloth_fixed", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "task_specific_params",
}  # fmt: skip
_TOKEN_IDS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
}  # fmt: skip
# pretraining_tp splits one sum in another order, which transformers itself no longer does.
_TRAINING = {
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "use_cache",
    "gradient_checkpointing", "pretraining_tp",
}  # fmt: skip
_RETURN_VALUES = {
    "output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate",
    "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward",
}  # fmt: skip
# Old versions of transformers wrote these into every config.json.
_GENERATION = {
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "prefix",
}  # fmt: skip
HARMLESS = frozenset(_BOOKKEEPING | _TOKEN_IDS | _TRAINING | _RETURN_VALUES | _GENERATION)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1.0,),
}

DTYPE_NAMES = ("bfloat16", "float16", "float32")

MAX_LAYERS = 4096

_FULL, _SLIDING = "full_attention", "sliding_attention"

logger = logging.getLogger(__name__)


def decoder_config(config: Mapping[str, Any], path: Path) -> DecoderConfig:
    """Map config.json, found at `path`, to a decoder. Raises CheckpointError listing every problem."""
    name, architecture = _architecture(config, path)
    problems: list[str] = []
    fields = Fields({**architecture.defaults, **_without_nulls(config)}, problems)
    if "sliding_window" in config and config["sliding_window"] is None:  # the one null that is no default
        fields.values.pop("sliding_window", None)
    hidden = fields.size("hidden_size")
    layers = fields.size("num_hidden_layers", maximum=MAX_LAYERS)
    heads, kv_heads, head_dim = _attention(fields, hidden)
    positions = fields.size("max_position_embeddings")
    multipliers = _multipliers(fields, architecture, head_dim)
    biases = architecture.attention_biases or (fields.flag("attention_bias", False),) * 2
    decoder = DecoderConfig(
        architecture=name,
        dtype=_dtype(fields),
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=_activation(fields, architecture),
        rms_norm_eps=fields.number("rms_norm_eps") / multipliers.embedding**2,
        max_position_embeddings=positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=biases[0],
        attention_output_bias=biases[1],
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=architecture.qk_norm,
        attention_scale=multipliers.attention,
        residual_factor=multipliers.residual / multipliers.embedding,
        logit_factor=1 / multipliers.logits,
        layer_windows=_windows(fields, architecture, layers),
        rotary_layers=_rotary_layers(fields, architecture, layers),
        rope=read_rope(fields, positions, "rope_theta" in config),
    )
    fields.used |= architecture.ignored
    _refuse_the_rest(fields, {**NEUTRAL, **architecture.neutral})
    if problems:
        raise CheckpointError(path, problems)
    _tell_of_defaults(config, path, decoder)
    return decoder


def _tell_of_defaults(config: Mapping[str, Any], path: Path, decoder: DecoderConfig) -> None:
    """Warn of what is missing and changes the output, should the default not be what the model was made with."""
    spellings = [config, *(config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))]
    if all(each.get("rope_theta") is None for each in spellings):
        logger.warning("%s: rope_theta is missing, %g is taken", path, decoder.rope.theta)
    if config.get("tie_word_embeddings") is None:
        taken = str(decoder.tie_word_embeddings).lower()
        logger.warning("%s: tie_word_embeddings is missing, %s is taken", path, taken)


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _architecture(config: Mapping[str, Any], path: Path) -> tuple[str, Architecture]:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            path, [f"architectures: {shown(name)} is not supported, expected {', '.join(ARCHITECTURES)}"]
        )
    architecture = ARCHITECTURES[name]
    model_type = config.get("model_type", architecture.model_type)
    if model_type != architecture.model_type:
        raise CheckpointError(
            path, [f"model_type: {shown(model_type)} contradicts {name}, expected {shown(architecture.model_type)}"]
        )
    return name, architecture


def _attention(fields: Fields, hidden: int) -> tuple[int, int, int]:
    """Query heads, key-value heads and the size of a head."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        fields.problem("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if fields.get("head_dim") is None and hidden % heads:
        fields.problem("num_attention_heads", f"{heads} does not divide hidden_size {hidden}, and head_dim is absent")
    head_dim = fields.size("head_dim", max(hidden // heads, 1))
    if head_dim % 2:
        fields.problem("head_dim", f"{head_dim} is odd, rotary positions need pairs")
    return heads, kv_heads, head_dim


def _dtype(fields: Fields) -> str:
    """`dtype`, or `torch_dtype` as it was called; float32 when neither is there, as in transformers."""
    new, old = fields.get("dtype"), fields.get("torch_dtype")
    if new is not None and old is not None and new != old:
        fields.problem("dtype", f"{shown(new)} contradicts torch_dtype {shown(old)}")
    dtype = new or old or "float32"
    if dtype not in DTYPE_NAMES:
        fields.problem("dtype", f"{shown(dtype)} is not supported, expected one of {', '.join(DTYPE_NAMES)}")
    return str(dtype)


def _activation(fields: Fields, architecture: Architecture) -> str:
    activation = fields.get("hidden_act")
    if activation not in architecture.activations:
        fields.problem(
            "hidden_act", f"{shown(activation)} is not supported, expected {' or '.join(architecture.activations)}"
        )
    return str(activation)


class _Multipliers(NamedTuple):
    attention: float
    residual: float = 1.0
    embedding: float = 1.0
    logits: float = 1.0


def _multipliers(fields: Fields, architecture: Architecture, head_dim: int) -> _Multipliers:
    """Granite's four. The engine keeps its residual stream divided by that of the embedding: norms do not see a factor,
    if their eps is divided by its square, and what is added to the stream is divided by it."""
    if "residual_multiplier" not in architecture.defaults:
        return _Multipliers(head_dim**-0.5)
    names = ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling")
    return _Multipliers(*(fields.number(name) for name in names))


def _windows(fields: Fields, architecture: Architecture, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window, None for full attention: by `layer_types`, else from `max_window_layers` on."""
    window, enabled = fields.get("sliding_window"), fields.flag("use_sliding_window", True)
    first, kinds = fields.get("max_window_layers") or 0, fields.get("layer_types")
    if window not in (None, 0) and enabled and not architecture.has_windows:
        fields.problem(
            "sliding_window", f"{shown(window)} is not supported for {architecture.model_type}, expected null"
        )
    elif window not in (None, 0) and enabled:
        window = fields.size("sliding_window")
    else:
        window = None
    if kinds is None:
        kinds = [_SLIDING if window is not None and layer >= first else _FULL for layer in range(layers)]
    allowed = {_FULL, _SLIDING} if window is not None else {_FULL}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in allowed for kind in kinds):
        fields.problem("layer_types", f"expected {' or '.join(sorted(allowed))} for each of {layers} layers")
        return (None,) * layers
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _rotary_layers(fields: Fields, architecture: Architecture, layers: int) -> tuple[bool, ...]:
    """Layers whose `no_rope_layers` is 1, as SmolLM3 has it, else all but every `no_rope_layer_interval`-th."""
    if "no_rope_layer_interval" not in architecture.defaults:
        return (True,) * layers
    given, interval = fields.get("no_rope_layers"), fields.size("no_rope_layer_interval")
    if given is None:
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(given, list) or len(given) != layers or not all(value in (0, 1) for value in given):
        fields.problem("no_rope_layers", f"expected 0 or 1 for each of {layers} layers")
        return (True,) * layers
    return tuple(bool(value) for value in given)


def _refuse_the_rest(fields: Fields, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        fields.problem("quantization_config", f"quantization {shown(method)} is not supported")
    for name in fields.unused():
        value = fields.values[name]
        if name in HARMLESS or value in neutral.get(name, ()):
            continue
        fields.problem(name, f"{shown(value)} is not a setting this engine knows, and it may change the model's output")
