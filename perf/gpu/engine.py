"""The whole engine on the card: golden ids, company, a second engine; and speed at the geometries of known models.

Weights of the timed models are random (their ids make no sense) and views of one short array, so that 16 GB of them
are there at once. TTFT is of a prompt that no cache holds, alone; throughput is of steps in which every row decodes.
"""

import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import uvloop
from numpy.typing import NDArray

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.observe.records import PHASES, IterationRecord
from loader.decoder import DecoderConfig
from loader.parameters import parameter_table
from perf.gpu.golden import BOUND, GOLDEN, NAMES

PROMPT_TOKENS = 512
ROWS = (1, 8, 32, 128)
OUTPUTS = 96

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "dtype": "bfloat16",
}  # fmt: skip
GEOMETRIES = {
    "smollm2": _LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "llama3": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip

Cases = Iterator[tuple[str, float]]


def check_golden_ids() -> Cases:
    """Greedy ids of another implementation in float32; one may differ where the two are as close as rounding is."""
    for name in NAMES:
        golden = np.load(GOLDEN / name / "golden.npz")
        prompts = [golden[f"prompt_{k}"].tolist() for k in range(7)]
        with _llm(GOLDEN / name) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts], _greedy(24, logprobs=20), use_tqdm=False
            )
        for k, output in enumerate(outputs):
            choice, bound = output.outputs[0], 2 * BOUND * golden[f"logits_{k}"].std()
            share = 0.0
            assert choice.logprobs is not None
            for got, want, tops in zip(choice.token_ids, golden[f"greedy_{k}"].tolist(), choice.logprobs, strict=True):
                if got != want:
                    share = (tops[got].logprob - tops[want].logprob) / bound if want in tops else np.inf
                    break
            yield f"{name} prompt {k}", float(share)


def check_company() -> Cases:
    """Ids and log-probabilities of seeded and greedy requests, alone and beside others, bit for bit."""
    rng = np.random.default_rng(6)
    prompts = [{"prompt_token_ids": rng.integers(3, 500, length).tolist()} for length in (3, 16, 40, 61, 100, 20)]
    params = [_greedy(40, logprobs=2, temperature=t, seed=9) for t in (0.0, 0.8, 1.0, 0.0, 1.2, 0.7)]
    with _llm(GOLDEN / "llama", batch_invariant=True, enable_prefix_caching=False, max_num_batched_tokens=64) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            alone = llm.generate([prompt], one, use_tqdm=False)[0].outputs[0]
            other = together[i].outputs[0]
            same = alone.token_ids == other.token_ids and alone.logprobs == other.logprobs
            yield f"prompt of {len(prompt['prompt_token_ids'])} tokens", 0.0 if same else 2.0


def check_again() -> Cases:
    """A process's second engine has the memory of its first."""
    blocks = []
    for _ in range(2):
        with LLM(str(GOLDEN / "llama"), device="cuda") as llm:
            blocks.append(llm._thread.engine.info.num_blocks)
    yield f"{blocks[0]} KV blocks, then {blocks[1]}", 0.0 if blocks[1] > 0.9 * blocks[0] else 2.0


ENGINE_CHECKS: dict[str, Callable[[], Cases]] = {
    "golden": check_golden_ids, "company": check_company, "again": check_again,
}  # fmt: skip


def _llm(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), device="cuda", kv_cache_memory_bytes=64 << 20, max_num_seqs=8, **settings)


def _greedy(max_tokens: int, **values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | values)


def speed(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(GEOMETRIES[name]))
        with mock.patch("engine.devices.cuda.device.dummy_weights", SlidingWeights):
            return uvloop.run(_speed(folder))


async def _speed(folder: str) -> dict[str, Any]:
    config = EngineConfig(
        model=folder, device="cuda", load_format="dummy", max_model_len=4096, max_num_seqs=max(ROWS),
        max_num_batched_tokens=2048, kv_cache_memory_bytes=16 << 30, enable_prefix_caching=False,
    )  # fmt: skip
    began = perf_counter()
    async with Engine(config) as engine:
        found: dict[str, Any] = {"load, s": round(perf_counter() - began, 2)}
        vocab = engine.info.vocab_size
        await _run(engine, vocab, rows=2, tokens=8)
        ttft = [(await _run(engine, vocab, rows=1, tokens=1, prompt=PROMPT_TOKENS))[0] for _ in range(7)]
        found[f"TTFT {PROMPT_TOKENS}, ms"] = round(1e3 * statistics.median(ttft), 3)
        for temperature, rows in ((0.0, ROWS), (1.0, ROWS[-1:])):
            for count in rows:
                _, records = await _run(engine, vocab, rows=count, tokens=OUTPUTS, temperature=temperature)
                label = f"{count} rows" + (" sampled, top-p" if temperature else "")
                found[label] = _decoding(records, count)
        assert await engine.audit() == []
    return found


async def _run(
    engine: Engine, vocab: int, *, rows: int, tokens: int, prompt: int = 64, temperature: float = 0.0
) -> tuple[float, list[IterationRecord]]:
    """Seconds, and the loop's records, of requests at once with new prompts."""
    params = _greedy(tokens, temperature=temperature, top_p=0.9 if temperature else 1.0)
    prompts = [[random.randrange(100, vocab) for _ in range(prompt)] for _ in range(rows)]
    engine.start_profile()
    began = perf_counter()
    streams = [engine.generate(ids, params) for ids in prompts]

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    await asyncio.gather(*map(read, streams))
    return perf_counter() - began, engine.stop_profile().iterations


def _decoding(records: list[IterationRecord], rows: int) -> dict[str, float]:
    """Medians over the steps in which every row decodes and nothing else happens, milliseconds."""
    steps = [r for r in records if r.decode_rows == rows and r.prefill_rows == 0 and r.sampled == rows][4:]
    period = statistics.median(r.seconds + r.idle for r in steps)
    phases = {name: statistics.median(r.phases[i] for r in steps) for i, name in enumerate(PHASES)}
    return {
        "tokens/s": round(rows / period),
        "step, ms": round(1e3 * period, 3),
        "gpu, ms": round(1e3 * statistics.median(r.device_seconds for r in steps), 3),
        **{f"{name}, ms": round(1e3 * phases[name], 3) for name in ("schedule", "launch", "sample", "device")},
        "settle and publish, ms": round(1e3 * (phases["settle"] + phases["publish"]), 3),
    }


class SlidingWeights:
    """A WeightSource: norms are 1, the rest normal with deviation 0.02, every row the last one moved by 64 places."""

    def __init__(self, decoder: DecoderConfig, seed: int) -> None:
        self._table = parameter_table(decoder)
        longest = max(64 * shape[0] + shape[-1] for shape in self._table.values())
        self._values = (np.random.default_rng(seed).standard_normal(longest, np.float32) * 0.02).astype(
            ml_dtypes.bfloat16
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._table)

    @property
    def nbytes(self) -> int:
        return 2 * sum(int(np.prod(shape)) for shape in self._table.values())

    def tensor(self, name: str) -> NDArray[Any]:
        shape = self._table[name]
        if len(shape) == 1:
            return np.ones(shape, ml_dtypes.bfloat16)
        return np.lib.stride_tricks.as_strided(self._values, shape, (128, 2), writeable=False)
