"""plan_memory: the arithmetic and its refusals."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.devices.memory import KV_DEFAULT_BYTES, MemoryFacts, plan_memory
from engine.errors import ConfigError

MIB = 1 << 20
FACTS = MemoryFacts(available=1000 * MIB, weights=300 * MIB, workspace=100 * MIB, block=MIB)


def plan(**settings: Any) -> tuple[int, int]:
    config = EngineConfig(model="m", **settings)
    ledger = plan_memory(config, FACTS, 2048)
    return ledger.num_blocks, ledger.max_model_len


def test_the_budget_is_spent_on_whole_blocks() -> None:
    assert plan(kv_cache_memory_bytes=200 * MIB + 5) == (200, 2048)


def test_no_more_blocks_than_all_rows_can_use() -> None:
    assert plan(kv_cache_memory_bytes=600 * MIB, max_model_len=160, max_num_seqs=2) == (20, 160)


def test_a_share_of_the_free_memory_is_the_default() -> None:
    assert plan() == (150, 2048)
    roomy = MemoryFacts(available=100_000 * MIB, weights=0, workspace=0, block=MIB)
    assert plan_memory(EngineConfig(model="m"), roomy, 2048).num_blocks == KV_DEFAULT_BYTES // MIB


def test_the_length_shrinks_to_what_fits_unless_it_was_asked_for() -> None:
    assert plan(kv_cache_memory_bytes=10 * MIB) == (10, 160)
    with pytest.raises(ConfigError, match=r"2048 tokens needs 128 blocks of 1\.00 MiB, but 10\.00 MiB .* hold 10"):
        plan(kv_cache_memory_bytes=10 * MIB, max_model_len=2048)


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"1,000\.00 MiB available - 300\.00 MiB weights - 100\.00 MiB workspace"):
        plan(kv_cache_memory_bytes=601 * MIB)


def test_weights_that_do_not_fit_are_named() -> None:
    """No flag that nobody gave, and no size below 0 without its arithmetic."""
    small = MemoryFacts(available=200 * MIB, weights=300 * MIB, workspace=100 * MIB, block=MIB)
    for budget in (None, MIB):
        with pytest.raises(ConfigError, match=r"^the model does not fit: 200\.00 MiB available - .* = -200\.00 MiB, "):
            plan_memory(EngineConfig(model="m", kv_cache_memory_bytes=budget), small, 2048)


def test_a_length_that_shrinks_is_said_with_what_would_do(caplog: pytest.LogCaptureFixture) -> None:
    plan(kv_cache_memory_bytes=128 * MIB)
    assert caplog.text == ""
    plan(kv_cache_memory_bytes=127 * MIB)
    assert "is 2032, not the model's 2048: KV blocks have 127.00 MiB" in caplog.text
    assert f"needs 128.00 MiB (--kv-cache-memory-bytes {128 * MIB})" in caplog.text


def test_a_length_above_the_models_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len: 4096 is above the model's limit of 2048"):
        plan(max_model_len=4096)


def test_the_ledger_prints_blocks_and_tokens() -> None:
    text = str(plan_memory(EngineConfig(model="m", kv_cache_memory_bytes=128 * MIB), FACTS, 2048))
    assert "128 blocks of 16 tokens: 2048 tokens, 1.0 sequences" in text
    assert "weights      300.00 MiB" in text
