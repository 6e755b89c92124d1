"""GGUF files for tests, written with the `gguf` package from the golden Llama."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from tests.loader.files import LLAMA, read_tensors

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

HEAD_DIM = 64

METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 128,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": HEAD_DIM,
    "llama.attention.value_length": HEAD_DIM,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 512,
}


def gguf_name(name: str) -> str:
    module, suffix = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[inner]}.{suffix}"
    return f"{GGUF_NAMES[module]}.{suffix}"


def permute(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Row i + j * half of each head goes to 2i + j, one row at a time."""
    out = np.empty_like(values)
    half = head_dim // 2
    for head in range(0, len(values), head_dim):
        for i in range(half):
            for j in range(2):
                out[head + 2 * i + j] = values[head + i + j * half]
    return out


def golden_tensors(folder: Path = LLAMA, head_dim: int = HEAD_DIM) -> dict[str, np.ndarray]:
    """Float32 tensors of a golden folder under their GGUF names, as llama.cpp stores them."""
    found = {}
    for name, array in read_tensors(folder / "model.safetensors").items():
        values = array.astype(np.float32)
        found[gguf_name(name)] = permute(values, head_dim) if ".q_proj." in name or ".k_proj." in name else values
    return found


def sentencepiece_vocab(words: list[str]) -> dict[str, Any]:
    """512 tokens: three special ones, the bytes, `words` from best to worst score, padding."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    padding = 512 - len(tokens)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{i}]" for i in range(padding))],
        "tokenizer.ggml.token_type": [*types, *[5] * padding],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1e4] * padding,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
    }


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
) -> Path:
    """Matrices in `kind`, vectors in float32."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        if array.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
