"""config.json in all the spellings that exist, and refusals by name."""

from pathlib import Path
from typing import Any

import pytest

from loader.architectures import decoder_config
from loader.decoder import DecoderConfig
from loader.errors import CheckpointError
from tests.loader.files import config

PATH = Path("folder/config.json")


def decoder(**changes: Any) -> DecoderConfig:
    return decoder_config(config(**changes), PATH)


def problems(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        decoder(**changes)
    assert "folder/config.json" in str(caught.value)
    return caught.value.problems


def test_every_field_of_a_plain_config() -> None:
    found = decoder()
    assert (found.architecture, found.dtype, found.hidden_act) == ("LlamaForCausalLM", "bfloat16", "silu")
    assert (found.vocab_size, found.hidden_size, found.intermediate_size, found.num_hidden_layers) == (512, 128, 256, 2)
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (4, 2, 64)
    assert (found.rms_norm_eps, found.max_position_embeddings, found.attention_scale) == (1e-5, 512, 0.125)
    assert not (found.tie_word_embeddings or found.attention_bias or found.mlp_bias)
    assert found.layer_windows == (None, None)
    assert (found.rope.kind, found.rope.theta) == ("default", 10000.0)


def test_what_transformers_leaves_out_has_its_defaults() -> None:
    """The first Llama configs have neither biases nor rope nor tie_word_embeddings."""
    dropped = dict.fromkeys(
        ["attention_bias", "mlp_bias", "rope_parameters", "tie_word_embeddings", "hidden_act", "rms_norm_eps", "dtype"],
        ...,
    )
    found = decoder(**dropped, max_position_embeddings=...)
    assert found == decoder(
        attention_bias=False,
        mlp_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
        dtype="float32",
    )


@pytest.mark.parametrize("absent", [..., None])
def test_l15_head_dim(absent: Any) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    assert decoder(**shape, head_dim=32).head_dim == 32
    assert decoder(**shape, head_dim=absent).head_dim == 16
    assert decoder(**shape, head_dim=absent).attention_scale == 0.25


def test_l15_head_dim_that_cannot_be() -> None:
    assert problems(head_dim=33) == ("head_dim: 33 is odd, rotary positions need pairs",)
    (problem,) = problems(head_dim=..., num_attention_heads=3, num_key_value_heads=3)
    assert "num_attention_heads: 3 does not divide hidden_size 128" in problem


@pytest.mark.parametrize("absent", [..., None])
def test_l16_kv_heads_default_to_heads(absent: Any) -> None:
    assert decoder(num_key_value_heads=absent).num_key_value_heads == 4
    assert decoder(num_key_value_heads=1).num_key_value_heads == 1


def test_l16_kv_heads_must_divide() -> None:
    assert problems(num_key_value_heads=3) == ("num_key_value_heads: 3 does not divide num_attention_heads 4",)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": None},
        {"sliding_window": 0},
        {"sliding_window": 8, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_l30_no_window(fields: dict[str, Any]) -> None:
    assert decoder(**fields).layer_windows == (None, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 8},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["full_attention"]},
    ],
)
def test_l30_windows_are_refused_at_load(fields: dict[str, Any]) -> None:
    (problem,) = problems(**fields)
    assert problem.split(":")[0] in fields


@pytest.mark.parametrize("names", [["MambaForCausalLM"], [], None, "Mamba", ["LlamaForCausalLM"] * 2, [[]]])
def test_unknown_architecture(names: Any) -> None:
    (problem,) = problems(architectures=names)
    assert problem.startswith("architectures: ") and "LlamaForCausalLM" in problem


def test_model_type_must_agree() -> None:
    assert "model_type: 'qwen2' contradicts" in problems(model_type="qwen2")[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("attn_logit_softcapping", 50.0),
        ("query_pre_attn_scalar", 256),
        ("residual_multiplier", 0.22),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("a_field_of_next_year", 1),
    ],
)
def test_fields_that_may_change_the_math_are_refused_by_name(name: str, value: Any) -> None:
    (problem,) = problems(**{name: value})
    assert problem.startswith(f"{name}: ")


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_quantization_is_refused_with_its_method(method: str) -> None:
    assert problems(quantization_config={"quant_method": method}) == (
        f"quantization_config: quantization '{method}' is not supported",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_logit_softcapping": None, "quantization_config": None},
        {"pretraining_tp": 4, "attention_dropout": 0.1, "temperature": 0.7, "pruned_heads": {}},
        {"rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {"dtype": "q4"}},
        {"_name_or_path": "x", "id2label": {"0": "a"}, "is_encoder_decoder": False, "partial_rotary_factor": 1.0},
    ],
)
def test_fields_that_do_not_change_the_math_pass(fields: dict[str, Any]) -> None:
    assert decoder(**fields) == decoder()


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": ..., "torch_dtype": "float16"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "float16"}, "float16"),
        ({"dtype": None}, "float32"),
    ],
)
def test_dtype_in_both_spellings(fields: dict[str, Any], dtype: str) -> None:
    assert decoder(**fields).dtype == dtype


@pytest.mark.parametrize("fields", [{"torch_dtype": "float32"}, {"dtype": "float64"}, {"dtype": 1}])
def test_dtype_refused(fields: dict[str, Any]) -> None:
    assert problems(**fields)[0].startswith("dtype: ")


@pytest.mark.parametrize("value", [0, -1, 1.5, "128", True, [128], 1 << 40])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
def test_sizes_must_be_positive_integers(name: str, value: Any) -> None:
    assert any(p.startswith(f"{name}: found {value!r}") for p in problems(**{name: value}))


@pytest.mark.parametrize("value", [0, -1e-5, "1e-5", True, float("inf"), float("nan")])
def test_eps_must_be_a_positive_number(value: Any) -> None:
    assert problems(rms_norm_eps=value)[0].startswith("rms_norm_eps: ")


def test_flags_and_activation() -> None:
    assert problems(tie_word_embeddings="yes")[0].startswith("tie_word_embeddings: ")
    assert problems(hidden_act="gelu") == ("hidden_act: 'gelu' is not supported, expected silu",)


def test_everything_wrong_is_listed_at_once() -> None:
    found = problems(hidden_size=..., vocab_size=0, hidden_act="relu", mystery=1, num_key_value_heads=3)
    assert {p.split(":")[0] for p in found} == {
        "hidden_size", "vocab_size", "hidden_act", "mystery", "num_key_value_heads"
    }  # fmt: skip
    assert "hidden_size: is missing, expected an integer" in found[0]


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": ...}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        (MISTRAL, (4096, 4096)),  # transformers' default
        (MISTRAL | {"sliding_window": None}, (None, None)),
        (MISTRAL | {"sliding_window": 24}, (24, 24)),
        (QWEN2 | {"sliding_window": 24}, (None, None)),  # off unless it is switched on
        (QWEN2 | {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1}, (None, 24)),
        (QWEN2 | {"sliding_window": 24, "use_sliding_window": True}, (None, None)),  # from the 28th layer on
        (QWEN2 | {"sliding_window": 24, "use_sliding_window": True, "layer_types": [SLIDING, FULL]}, (24, None)),
    ],
)
def test_sliding_windows(given: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert decoder(**given).layer_windows == windows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (MISTRAL | {"sliding_window": -1}, "sliding_window: found -1, expected an integer from 1"),
        (QWEN2 | {"layer_types": [SLIDING, FULL]}, "layer_types: expected full_attention for each of 2 layers"),
        (MISTRAL | {"layer_types": [FULL]}, "layer_types: expected full_attention or sliding_attention for each"),
        (QWEN2 | {"use_sliding_window": "yes"}, "use_sliding_window: found 'yes', expected true or false"),
        ({"sliding_window": 24}, "sliding_window: 24 is not supported for llama, expected null"),
    ],
)
def test_windows_that_cannot_be(given: dict[str, Any], message: str) -> None:
    assert any(problem.startswith(message) for problem in problems(**given))


def test_which_products_have_biases() -> None:
    assert (decoder(**QWEN2).attention_bias, decoder(**QWEN2).attention_output_bias) == (True, False)
    assert (decoder(**MISTRAL).attention_bias, decoder(**MISTRAL).attention_output_bias) == (False, False)
    assert decoder(attention_bias=True).attention_output_bias


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}


def test_heads_with_norms() -> None:
    assert decoder(**QWEN3).qk_norm and not decoder(**QWEN2).qk_norm
    assert decoder(**QWEN3, attention_bias=True).attention_output_bias
    assert decoder(**QWEN3, head_dim=...).head_dim == 128  # whatever hidden_size / heads is


def test_layers_without_rotation() -> None:
    assert decoder(**SMOLLM3, no_rope_layers=[1, 0]).rotary_layers == (True, False)
    four = {"num_hidden_layers": 4}
    assert decoder(**SMOLLM3, **four).rotary_layers == (True, True, True, False)
    assert decoder(**SMOLLM3, **four, no_rope_layer_interval=2).rotary_layers == (True, False, True, False)
    assert problems(**SMOLLM3, no_rope_layers=[1, 2]) == ("no_rope_layers: expected 0 or 1 for each of 2 layers",)
    assert problems(no_rope_layers=[1, 0])[0].startswith("no_rope_layers: ")  # no field of Llama's


def test_phi3_without_longrope() -> None:
    assert decoder(**PHI3, original_max_position_embeddings=4096).rotary_layers == (True, True)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [1.0], "short_factor": [1.0]}
    assert any("longrope" in problem for problem in problems(**PHI3, rope_parameters=rope))
