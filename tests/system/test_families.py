"""Every family through the whole engine in float32: golden ids in mixed batches, chunked, with hits and preemption."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Engine, EngineConfig, SamplingParams
from loader.checkpoint import open_checkpoint
from tests.conftest import GOLDEN
from tests.engine.server import tokens_of

NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def config(name: str, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(GOLDEN / name), device="cpu", dtype="float32", cpu_threads=1, max_num_seqs=8, **settings
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("budget", "blocks"), [(8, 400), (64, 400), (16, 12)])
async def test_golden_ids_whatever_goes_on_beside(name: str, budget: int, blocks: int) -> None:
    golden = np.load(Path(GOLDEN) / name / "golden.npz")
    prompts = [golden[f"prompt_{k}"].tolist() for k in range(7)]
    expected = [golden[f"greedy_{k}"].tolist() for k in range(7)]
    decoder = open_checkpoint(GOLDEN / name).decoder
    block = 16 * 2 * 4 * decoder.num_hidden_layers * decoder.num_key_value_heads * decoder.head_dim
    settings = config(name, max_num_batched_tokens=budget, kv_cache_memory_bytes=blocks * block, max_model_len=144)
    async with Engine(settings) as engine:
        for _ in range(2):  # the second time from the prefix cache
            streams = [engine.generate(prompt, GREEDY) for prompt in prompts]
            assert [await tokens_of(stream) for stream in streams] == expected
        stats = await engine.stats()
        assert await engine.audit() == []
    assert stats.prefix_cache_hits > 0 or blocks == 12
    assert (stats.num_preemptions > 0) == (blocks == 12)
