"""config.json of published checkpoints, as they are: Llama 1 to 3.3 and SmolLM2."""

from pathlib import Path
from typing import Any

import pytest

from loader.architectures import decoder_config
from loader.checkpoint import open_checkpoint
from loader.decoder import RopeConfig

COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "use_cache": True,
}

LLAMA_1_7B = COMMON | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_sequence_length": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "transformers_version": "4.27.0.dev0",
    "vocab_size": 32000,
}

LLAMA_2_70B = COMMON | {
    "_name_or_path": "meta-llama/Llama-2-70b-hf",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.32.0.dev0",
    "vocab_size": 32000,
}

LLAMA_3_2_1B = COMMON | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "vocab_size": 128256,
}

SMOLLM2_135M = COMMON | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "vocab_size": 49152,
}


@pytest.mark.parametrize(
    ("config", "heads", "dtype", "rope"),
    [
        (LLAMA_1_7B, (32, 32, 128), "float16", RopeConfig(kind="default", theta=1e4)),
        (LLAMA_2_70B, (64, 8, 128), "float16", RopeConfig(kind="default", theta=1e4)),
        (
            LLAMA_3_2_1B,
            (32, 8, 64),
            "bfloat16",
            RopeConfig(kind="llama3", theta=5e5, factor=32.0, original_max_position_embeddings=8192),
        ),
        (SMOLLM2_135M, (9, 3, 64), "bfloat16", RopeConfig(kind="default", theta=1e5)),
    ],
    ids=["llama-1-7b", "llama-2-70b", "llama-3.2-1b", "smollm2-135m"],
)
def test_published_configs(config: dict[str, Any], heads: tuple[int, int, int], dtype: str, rope: RopeConfig) -> None:
    decoder = decoder_config(config, Path("config.json"))
    assert (decoder.num_attention_heads, decoder.num_key_value_heads, decoder.head_dim) == heads
    assert decoder.dtype == dtype and decoder.rope == rope
    assert decoder.tie_word_embeddings == config.get("tie_word_embeddings", False)


def test_imported_smollm2_is_the_published_one(smollm2: Path) -> None:
    assert open_checkpoint(smollm2).decoder == decoder_config(SMOLLM2_135M, Path("config.json"))
