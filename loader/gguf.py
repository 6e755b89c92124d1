"""Import of a Llama-family GGUF file as a Hugging Face style folder, weights in bfloat16.

What is in the file is either carried over or refused by name, like a config.json field
(`loader/architectures.py`). The folder appears complete or not at all: it is written beside its target and
renamed. Needs the optional package `gguf`, which also dequantizes.
Read next: `loader/gguf_tokenizer.py` (the vocabulary), `loader/demo.py` (who uses this).
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.architectures import decoder_config
from loader.checkpoint import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from loader.decoder import DecoderConfig, RopeConfig
from loader.errors import CheckpointError, shown
from loader.fields import Fields
from loader.generation import GENERATION_FILE
from loader.gguf_tokenizer import build_tokenizer, special_token_ids, tokenizer_config
from loader.parameters import Shape, parameter_table
from loader.progress import byte_progress
from loader.rope import inverse_frequencies
from loader.safetensors_writer import write_bfloat16
from loader.weights import SINGLE_FILE

Metadata = Mapping[str, Any]

INSTALL_HINT = "importing GGUF needs the package gguf: pip install 'engine-llm[demo]'"

_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

# Facts that the tensors tell as well, and notes.
_REDUNDANT_KEYS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")


def import_gguf(
    source: Path, target: Path, show: bool | None = None, *, sampling_defaults: Mapping[str, float] | None = None
) -> Path:
    """Write the model in `source` to the new folder `target` and return it. Raises CheckpointError.

    Args:
        sampling_defaults: what generation_config.json recommends; a GGUF file says nothing of it.
        show: progress bar; None shows one when stderr is a terminal.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(target, ["exists already, expected a new folder"])
    metadata, tensors = _read(source)
    config = _config(source, metadata, tensors)
    decoder = decoder_config(config, source)
    sources = _assign(source, decoder, tensors)
    tokenizer = build_tokenizer(source, metadata)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir()
    try:
        _write_json(partial / CONFIG_FILE, config)
        _write_json(partial / GENERATION_FILE, {**special_token_ids(metadata), **(sampling_defaults or {})})
        _write_json(partial / TOKENIZER_CONFIG_FILE, tokenizer_config(metadata))
        tokenizer.save(str(partial / TOKENIZER_FILE))
        _write_weights(source, partial / SINGLE_FILE, decoder, sources, show)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _read(source: Path) -> tuple[Metadata, dict[str, Any]]:
    """Metadata values, and ReaderTensors by GGUF name."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(source, [INSTALL_HINT]) from error
    try:
        reader = GGUFReader(source)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise CheckpointError(source, [f"cannot be read: {error.strerror or error}"]) from error
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # the reader checks nothing beyond the magic: a cut file fails wherever it is cut
        raise CheckpointError(source, ["is not a complete GGUF file"]) from error
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            source, [f"general.architecture: {shown(architecture)} is not supported, expected 'llama'"]
        )
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(source, ["split.count: a model split over files is not supported, merge it first"])
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _config(source: Path, metadata: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers would have written it."""
    problems: list[str] = []
    prefix = "llama."
    values = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    fields = Fields(values, problems, prefix)
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", max(hidden // heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.size(name, head_dim) != head_dim:
            fields.problem(name, f"expected {head_dim}, the size of a head, found {fields.values[name]}")
    for name in ("expert_count", "expert_used_count"):
        if fields.get(name):
            fields.problem(name, "mixture of experts is not supported")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _rows(tensors, "token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": fields.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(fields.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": fields.size("context_length"),
        "rope_parameters": _rope(fields, head_dim, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        **special_token_ids(metadata),
    }
    for name in fields.unused():
        if name not in _REDUNDANT_KEYS:
            fields.problem(name, f"{shown(fields.values[name])} is not a setting this import knows")
    if problems:
        raise CheckpointError(source, problems)
    return config


def _rows(tensors: Mapping[str, Any], name: str) -> int | None:
    return int(tensors[name].shape[-1]) if name in tensors else None


def _shortest(value: float) -> float:
    """The decimal that a float32 was written as: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(fields: Fields, head_dim: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` from `llama.rope.*` and the tensor of per-frequency factors."""
    theta = _shortest(fields.number("rope.freq_base", 10000.0))
    kind = fields.get("rope.scaling.type") or "none"
    factor = fields.get("rope.scaling.factor") or fields.get("rope.scale_linear")
    original = fields.get("rope.scaling.original_context_length")
    if fields.get("rope.scaling.attn_factor") not in (None, 1.0):
        fields.problem("rope.scaling.attn_factor", "is not supported")
    if _ROPE_FACTORS in tensors:
        return _llama3(fields, theta, head_dim, np.asarray(tensors[_ROPE_FACTORS].data, np.float64))
    if kind == "none" and factor in (None, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        scaled = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        return scaled | ({} if original is None else {"original_max_position_embeddings": original})
    fields.problem("rope.scaling.type", f"{shown(kind)} is not supported, expected none, linear or yarn")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3(fields: Fields, theta: float, head_dim: int, factors: NDArray[np.float64]) -> dict[str, Any]:
    """Llama 3's parameters, which GGUF keeps only as the table they result in; any other table is refused."""
    rope = RopeConfig(kind="llama3", theta=theta, factor=float(factors.max()), original_max_position_embeddings=8192)
    plain = inverse_frequencies(RopeConfig(kind="default", theta=theta), head_dim)
    expected = plain / inverse_frequencies(rope, head_dim)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        fields.problems.append(f"{_ROPE_FACTORS}: is not the table of Llama 3.1 to 3.3, no other is supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }


def _assign(source: Path, decoder: DecoderConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The GGUF tensor of every parameter, in the table's order; everything must fit."""
    table = parameter_table(decoder)
    named: dict[str, Any] = {}
    problems: list[str] = []
    for gguf_name, tensor in tensors.items():
        name = _parameter_name(gguf_name)
        if name in table:
            named[name] = tensor
        elif gguf_name != _ROPE_FACTORS:
            problems.append(f"{gguf_name}: is not a parameter of this model")
    for name, shape in table.items():
        if name not in named:
            problems.append(f"{name}: is missing, expected shape {list(shape)}")
        elif _shape(named[name]) != shape:
            problems.append(f"{named[name].name}: expected shape {list(shape)}, found {list(_shape(named[name]))}")
    if problems:
        raise CheckpointError(source, problems)
    return {name: named[name] for name in table}


def _parameter_name(gguf_name: str) -> str | None:
    module, _, suffix = gguf_name.rpartition(".")
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", module):
        inner = _LAYER_MODULES.get(layer[2])
        return None if inner is None else f"model.layers.{layer[1]}.{inner}.{suffix}"
    return f"{_MODULES[module]}.{suffix}" if module in _MODULES else None


def _shape(tensor: Any) -> Shape:
    """GGUF lists the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _write_weights(
    source: Path, path: Path, decoder: DecoderConfig, sources: Mapping[str, Any], show: bool | None
) -> None:
    from gguf.quants import dequantize

    table = parameter_table(decoder)
    total = sum(int(tensor.n_bytes) for tensor in sources.values())
    with byte_progress(f"Importing {source.name}", total, show) as advance:

        def tensors() -> Iterator[NDArray[np.float32]]:
            for name, tensor in sources.items():
                try:
                    values = dequantize(tensor.data, tensor.tensor_type).reshape(table[name])
                except NotImplementedError as error:
                    kind = tensor.tensor_type.name
                    raise CheckpointError(source, [f"{tensor.name}: type {kind} is not supported"]) from error
                yield _unpermute(name, values, decoder.head_dim)
                advance(int(tensor.n_bytes))

        write_bfloat16(path, table, tensors())


def _unpermute(name: str, values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Undo llama.cpp's reordering of query and key rows.

    Its rotary pairs are neighbours (2i, 2i + 1), ours are halves (i, i + head_dim / 2); `permute` in
    llama.cpp's convert_hf_to_gguf.py moves row i + j * head_dim / 2 of each head to 2i + j.
    """
    if ".q_proj." not in name and ".k_proj." not in name:
        return values
    rest = values.shape[1:]
    return values.reshape(-1, head_dim // 2, 2, *rest).swapaxes(1, 2).reshape(values.shape)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
