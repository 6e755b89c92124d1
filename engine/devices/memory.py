"""MemoryLedger: where the memory goes, decided before anything is loaded.

    KV blocks = (what the machine has free, or --kv-cache-memory-bytes) / bytes of a block

What does not fit is refused with the arithmetic. Read next: `engine/devices/__init__.py` for the facts.
"""

import logging
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ConfigError

log = logging.getLogger(__name__)

KV_SHARE = 0.25
"""Share of the free memory that KV blocks take when nobody says how much."""

KV_DEFAULT_BYTES = 1 << 30
"""Most that KV blocks take by default, unless one sequence of max_model_len needs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What a device needs for a model, in bytes.

    Attributes:
        available: free on the machine before anything is loaded.
        weights: parameters as the device keeps them.
        workspace: activations and tables for one step at the configured limits.
        block: one KV block of every layer.
        dedicated: nobody else needs what is available, so KV blocks may take all that is left of it.
    """

    available: int
    weights: int
    workspace: int
    block: int
    dedicated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """The facts and what follows from them."""

    facts: MemoryFacts
    block_size: int
    num_blocks: int
    max_model_len: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV blocks."""
        return self.num_blocks * self.facts.block

    def __str__(self) -> str:
        rows = [
            ("weights", self.facts.weights),
            ("workspace", self.facts.workspace),
            ("KV blocks", self.kv_bytes),
            ("available", self.facts.available),
        ]
        lines = [f"  {name:<10} {_mib(size):>12}" for name, size in rows]
        tokens = self.num_blocks * self.block_size
        lines.append(
            f"  {self.num_blocks} blocks of {self.block_size} tokens: {tokens} tokens, "
            f"{tokens / self.max_model_len:.1f} sequences of max_model_len {self.max_model_len}"
        )
        return "memory\n" + "\n".join(lines)


def plan_memory(config: EngineConfig, facts: MemoryFacts, max_position_embeddings: int) -> MemoryLedger:
    """Number of KV blocks and longest sequence. Raises ConfigError with the arithmetic."""
    free = facts.available - facts.weights - facts.workspace
    arithmetic = (
        f"{_mib(facts.available)} available - {_mib(facts.weights)} weights - {_mib(facts.workspace)} workspace = "
        f"{_mib(free)}"
    )
    if free <= 0:
        raise ConfigError(f"the model does not fit: {arithmetic}, which leaves nothing for KV blocks")
    wanted_len = config.max_model_len or max_position_embeddings
    if wanted_len > max_position_embeddings:
        raise ConfigError(f"max_model_len: {wanted_len} is above the model's limit of {max_position_embeddings}")
    blocks_per_sequence = -(-wanted_len // config.block_size)
    shared = min(max(KV_DEFAULT_BYTES, blocks_per_sequence * facts.block), int(free * KV_SHARE))
    budget = config.kv_cache_memory_bytes or (free if facts.dedicated else shared)
    if budget > free:
        raise ConfigError(f"kv_cache_memory_bytes: {_mib(budget)} do not fit: {arithmetic}")
    num_blocks = min(budget // facts.block, blocks_per_sequence * config.max_num_seqs)
    fitting_len = num_blocks * config.block_size
    if num_blocks < 1 or (config.max_model_len is not None and fitting_len < wanted_len):
        field = "max_model_len" if config.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"
        raise ConfigError(
            f"{field}: a sequence of {wanted_len} tokens needs {blocks_per_sequence} blocks of "
            f"{_mib(facts.block)}, but {_mib(budget)} for KV blocks hold {max(num_blocks, 0)} "
            f"({max(fitting_len, 0)} tokens)"
        )
    if fitting_len < wanted_len:
        log.warning(
            "max_model_len is %d, not the model's %d: KV blocks have %s, one sequence of that length needs %s "
            "(--kv-cache-memory-bytes %d)",
            fitting_len, wanted_len, _mib(budget), _mib(needed := blocks_per_sequence * facts.block), needed,
        )  # fmt: skip
    return MemoryLedger(
        facts=facts,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=min(wanted_len, fitting_len),
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"
