"""Memory facts of the cpu device: what the model will take, and what this machine has."""

import os
from pathlib import Path

from engine.config import EngineConfig
from engine.devices.cpu.layout import padded
from engine.devices.cpu.model import ModelShape, workspace_nbytes
from engine.devices.cpu.products import packed_product
from engine.devices.cpu.weights import packed_nbytes
from engine.devices.memory import MemoryFacts
from engine.errors import ConfigError
from loader.decoder import DecoderConfig
from loader.parameters import parameter_table

_CGROUP = Path("/sys/fs/cgroup")


def model_shape(config: EngineConfig, decoder: DecoderConfig, *, num_blocks: int, max_model_len: int) -> ModelShape:
    """Raises ConfigError for what only the cuda device can do."""
    if config.dtype == "float16":
        raise ConfigError("dtype: the cpu device computes in bfloat16 or float32, float16 needs --device cuda")
    return ModelShape(
        decoder=decoder,
        dtype=compute_dtype(config),
        kv_int8=config.kv_cache_dtype == "int8",
        weights_int8=config.quantization == "int8",
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget,
        threads=config.cpu_threads or available_threads(),
    )


def compute_dtype(config: EngineConfig) -> str:
    return "bfloat16" if config.dtype == "auto" else config.dtype


def cpu_memory_facts(config: EngineConfig, decoder: DecoderConfig) -> MemoryFacts:
    """Facts before anything is loaded. Raises ConfigError when NumKong is missing."""
    max_model_len = config.max_model_len or decoder.max_position_embeddings
    shape = model_shape(config, decoder, num_blocks=1, max_model_len=max_model_len)
    return MemoryFacts(
        available=available_bytes(),
        weights=_weights_nbytes(shape),
        workspace=workspace_nbytes(shape),
        block=shape.kv.block_nbytes,
    )


def _weights_nbytes(shape: ModelShape) -> int:
    """Packed products, float32 vectors, and the embedding where it lies.

    Products are counted one by one; those that are fused share panels, which takes no more.
    """
    product, total = packed_product(shape.dtype, shape.weights_int8), 0
    table = parameter_table(shape.decoder)
    for name, dims in table.items():
        if name == "model.embed_tokens.weight":
            total += dims[0] * dims[1] * (4 if shape.decoder.dtype == "float32" else 2)
        elif len(dims) == 1:
            total += 4 * padded(dims[0])
        else:
            total += packed_nbytes(product, dims[0], dims[1], shape.threads)
    if shape.decoder.tie_word_embeddings:
        total += packed_nbytes(product, shape.decoder.vocab_size, shape.decoder.hidden_size, shape.threads)
    return total


def available_threads() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int:
    """What a new process could take: free or reclaimable memory, within the control group's limit."""
    machine = _meminfo_available()
    group = _cgroup_available()
    return machine if group is None else min(machine, group)


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_available() -> int | None:
    """Limit less use of the control group (version 2), its page cache counted as free; None without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    except (OSError, ValueError):
        return None
