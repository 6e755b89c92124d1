"""A request says the same, bit for bit, whatever runs beside it, however it is chunked, cached or preempted.

Under one configuration of the model, that is: its dtype and its block size are part of the arithmetic.
"""

import asyncio
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from tests.conftest import GOLDEN
from tests.system.harness import Answer, ask, ask_among, is_clean

LLAMA = str(GOLDEN / "llama")
VOCAB = 512
BLOCK_BYTES = {"float32": 32768, "bfloat16": 16384}

SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 60, "min_p": 0.01, "seed": 123, "logprobs": 4}


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCAB, length).tolist()


PROBES: list[tuple[list[int], dict[str, Any]]] = [
    (prompt_of(1), {**SEEDED, "max_tokens": 40}),
    (prompt_of(17), {**SEEDED, "max_tokens": 33, "seed": 0}),
    (prompt_of(33), {**SEEDED, "max_tokens": 20, "n": 3}),
    (prompt_of(50), {**SEEDED, "max_tokens": 24, "repetition_penalty": 1.3, "frequency_penalty": 0.5}),
    (prompt_of(70), {**SEEDED, "max_tokens": 12, "prompt_logprobs": 2}),
    (prompt_of(64), {"max_tokens": 16, "temperature": 0.0, "logprobs": 2}),
]

SETTINGS: dict[str, dict[str, Any]] = {
    "one token at a time": {"long_prefill_token_threshold": 1, "max_num_seqs": 8},
    "one token in a step": {"max_num_batched_tokens": 3, "max_num_seqs": 3, "long_prefill_token_threshold": 1},
    "chunks of 8": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 17": {"max_num_batched_tokens": 17},
    "no chunks": {"enable_chunked_prefill": False},
    "no cache": {"enable_prefix_caching": False},
}


def config(dtype: str, **settings: Any) -> EngineConfig:
    defaults = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 512, "cpu_threads": 2}
    return EngineConfig(model=LLAMA, dtype=dtype, **(defaults | settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(dtype: str) -> list[Answer]:
    """Each probe, in an engine where nothing else ever ran."""

    async def ask_all() -> list[Answer]:
        async with Engine(config(dtype, enable_prefix_caching=False)) as engine:
            return [await ask(engine, prompt, **params) for prompt, params in PROBES]

    answers = asyncio.run(ask_all())
    assert len({tuple(c.ids) for a in answers for c in a.choices.values()}) == len(PROBES) + 2
    assert all(len(set(c.ids)) > 5 for a in answers for c in a.choices.values())
    return answers


RUNS = [*(("float32", name) for name in SETTINGS), *(("bfloat16", name) for name in ("chunks of 8", "chunks of 17"))]


@pytest.mark.parametrize(("dtype", "name"), RUNS, indirect=["dtype"])
async def test_chunks_hits_and_neighbours(dtype: str, alone: list[Answer], name: str) -> None:
    """S07, S08, K05, K21: a miss, a hit, then among requests that come and go."""
    async with Engine(config(dtype, **SETTINGS[name])) as engine:
        for (prompt, params), wanted in zip(PROBES, alone, strict=True):
            miss = await ask(engine, prompt, **params)
            hit = await ask(engine, prompt, **params)
            assert miss == wanted and hit == wanted
            may_hit = engine.config.enable_prefix_caching and "prompt_logprobs" not in params
            block = engine.config.block_size
            assert (miss.cached, hit.cached) == (0, (len(prompt) - 1) // block * block if may_hit else 0)
        for seed in range(2):
            assert await ask_among(engine, PROBES, VOCAB, seed) == alone
        assert await is_clean(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], indirect=True)
async def test_preemption(dtype: str, alone: list[Answer]) -> None:
    """K04: eleven blocks of 16 for up to eight sequences of up to 128 tokens."""
    async with Engine(config(dtype, kv_cache_memory_bytes=11 * BLOCK_BYTES[dtype])) as engine:
        assert engine.info.num_blocks == 11
        answers = await asyncio.gather(*(ask(engine, prompt, **params) for prompt, params in PROBES))
        assert answers == alone
        for seed in range(2):
            assert await ask_among(engine, PROBES, VOCAB, seed) == alone
        loop = engine._loop
        assert loop is not None and loop.roster.num_preemptions > 10
        assert await is_clean(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], indirect=True)
async def test_a_batch_of_different_parameters_in_any_order(dtype: str, alone: list[Answer]) -> None:
    """S07: each request is sampled with its own parameters."""
    async with Engine(config(dtype)) as engine:
        for order in (PROBES, PROBES[::-1]):
            answers = await asyncio.gather(*(ask(engine, prompt, **params) for prompt, params in order))
            assert answers == (alone if order is PROBES else alone[::-1])


async def test_unseeded_requests_differ_and_seed_zero_is_a_seed() -> None:
    """S11"""
    async with Engine(config("float32")) as engine:
        unseeded = [await ask(engine, prompt_of(9), temperature=1.5, max_tokens=12) for _ in range(2)]
        assert unseeded[0] != unseeded[1]
        zero = [await ask(engine, prompt_of(9), temperature=1.5, max_tokens=12, seed=0) for _ in range(2)]
        assert zero[0] == zero[1] != unseeded[0]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324])
async def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """S02"""
    async with Engine(config("bfloat16")) as engine:
        greedy = await ask(engine, prompt_of(9), temperature=0, max_tokens=12)
        assert await ask(engine, prompt_of(9), temperature=temperature, max_tokens=12) == greedy
