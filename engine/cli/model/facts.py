"""What a model is and what of it fits on this machine, before anything is loaded.

Everything but the weights is read; a folder with config.json alone will do. The arithmetic is the memory ledger's.
"""

import math
from typing import Any

from engine.config import EngineConfig
from engine.devices import choose_token_budget, memory_facts, select_device
from engine.devices.memory import plan_memory
from engine.errors import ConfigError
from engine.text.model import TextModel, open_model
from engine.text.tool_formats import tool_format
from loader.architectures import ARCHITECTURES
from loader.decoder import DecoderConfig
from loader.parameters import parameter_table

Facts = dict[str, Any]


def model_facts(config: EngineConfig) -> dict[str, Facts]:
    """Facts by name, in sections. Raises CheckpointError and ConfigError."""
    model = open_model(config)
    return {"model": _model(model.checkpoint.decoder), "text": _text(model), "memory": _memory(config, model)}


def architectures() -> list[tuple[str, str]]:
    """Names of the architectures that are loaded, and their `model_type`."""
    return sorted((name, architecture.model_type) for name, architecture in ARCHITECTURES.items())


def _model(decoder: DecoderConfig) -> Facts:
    windows = sorted({window for window in decoder.layer_windows if window is not None})
    return {
        "architecture": decoder.architecture,
        "parameters": sum(math.prod(shape) for shape in parameter_table(decoder).values()),
        "dtype": decoder.dtype,
        "layers": decoder.num_hidden_layers,
        "hidden_size": decoder.hidden_size,
        "heads": decoder.num_attention_heads,
        "kv_heads": decoder.num_key_value_heads,
        "head_dim": decoder.head_dim,
        "context": decoder.max_position_embeddings,
        "sliding_windows": windows or None,
        "vocabulary": decoder.vocab_size,
    }


def _text(model: TextModel) -> Facts:
    generation, template = model.checkpoint.generation, model.chat.template(for_tools=True)
    defaults = {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return {
        "tokens": None if model.tokenizer is None else model.tokenizer.vocab_size,
        "ends": list(generation.eos_token_ids),
        "chat_templates": sorted(model.checkpoint.chat_templates),
        "tool_format": None if template is None else tool_format(template),
        "sampling_defaults": {name: value for name, value in defaults.items() if value is not None},
    }


def _memory(config: EngineConfig, model: TextModel) -> Facts:
    """Bytes on the device that would be chosen, and how much context and company they leave room for."""
    kind = select_device(config.device)
    config = choose_token_budget(kind, config, model.checkpoint)
    facts = memory_facts(kind, config, model.checkpoint)
    sizes: Facts = {
        "device": kind,
        "weights_bytes": facts.weights,
        "workspace_bytes": facts.workspace,
        "kv_bytes_per_token": facts.block // config.block_size,
        "available_bytes": facts.available,
    }
    try:
        ledger = plan_memory(config, facts, model.checkpoint.decoder.max_position_embeddings)
    except ConfigError as error:
        return sizes | {"fits": False, "reason": str(error)}
    tokens = ledger.num_blocks * ledger.block_size
    return sizes | {
        "fits": True,
        "kv_tokens": tokens,
        "longest_sequence": ledger.max_model_len,
        "such_sequences_at_once": round(tokens / ledger.max_model_len, 1),
    }
