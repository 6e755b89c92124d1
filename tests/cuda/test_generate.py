"""L3: the whole cuda device, kernels executed from their PTX, generates what the cpu device does.

Both compute in bfloat16 and round in other places, so that logits differ: by at most 0.5 on tests/golden/llama (0.08
root mean square, of a standard deviation of 6), where the cpu device's own bfloat16 differs by 0.45 from float32.
Ids must be equal wherever the gap of the two most likely exceeds twice that.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.request.params import SamplingParams
from tests.conftest import GOLDEN
from tests.cuda.checkpoints import VOCAB, cut_smollm2
from tests.cuda.generating import Request, Run, assert_same_but_for_near_ties, generate, gpu, greedy

pytest.importorskip("cupy", reason="the double stands on CuPy's NVRTC wrapper: install the extra test-cuda")
pytestmark = pytest.mark.cuda

LLAMA = GOLDEN / "llama"
BOUND = 1.0


def prompt(seed: int, length: int, vocab: int = 512) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


WAVES = [
    [
        Request(prompt(0, 41), greedy(6, prompt_logprobs=0)),
        Request(prompt(1, 20), greedy(5, n=2)),
        Request(prompt(2, 3), greedy(7)),
    ],
    [Request([*prompt(0, 41), 9, 8], greedy(4)), Request(prompt(3, 17), greedy(4))],
]
"""A prompt of several chunks; choices that fork inside a block; a second prompt that begins as the first."""


@pytest.fixture(scope="module")
def reference() -> Run:
    return asyncio.run(generate(LLAMA, WAVES, device="cpu"))


@pytest.mark.parametrize("progress", ["lazy", "eager", "random"])
async def test_chunks_prefix_hits_and_forks(reference: Run, progress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu(monkeypatch, progress=progress) as double:
        run = await generate(LLAMA, WAVES, device="cuda", max_num_batched_tokens=16)
    counts = assert_same_but_for_near_ties(reference, run, BOUND)
    assert counts["tokens"] > 20 and counts["ties"] < 4
    assert run.outputs[3][0].num_cached_tokens == 32
    assert double.launches["copy_blocks"] > 0 and double.launches["logprobs_v0"] > 0
    assert run.problems == []


async def test_cublas(reference: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks go to cuBLAS, gates and ups with a kernel of their own for the activation; decoding does not."""
    monkeypatch.setattr("engine.devices.cuda.ops.cublas.FROM_ROWS", 16)
    monkeypatch.setattr("engine.devices.cuda.ops.cublas.FROM_WORK", 0)
    with gpu(monkeypatch) as double:
        run = await generate(LLAMA, WAVES, device="cuda")
    assert_same_but_for_near_ties(reference, run, BOUND)
    assert double.gemms > 0 and double.launches["silu_and_mul_v1"] > 0
    assert run.problems == []


async def test_int8_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both devices round a head with a scale of its own; rounding to int8 alone moves logits by up to 1.0 here."""
    expected = await generate(LLAMA, WAVES, device="cpu", kv_cache_dtype="int8")
    with gpu(monkeypatch) as double:
        run = await generate(LLAMA, WAVES, device="cuda", kv_cache_dtype="int8", max_num_batched_tokens=16)
    counts = assert_same_but_for_near_ties(expected, run, BOUND)
    assert counts["tokens"] > 15
    assert double.launches["copy_blocks"] % 2 == 0 and double.launches["copy_blocks"] > 0  # pages and scales
    assert run.problems == []


async def test_int8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine; that they are the rounded ones is test_device's."""
    waves = [[Request(prompt(0, 20), greedy(3))]]
    expected = await generate(LLAMA, waves, device="cpu")
    with gpu(monkeypatch):
        run = await generate(LLAMA, waves, device="cuda", quantization="int8", kv_cache_dtype="int8")
    assert assert_same_but_for_near_ties(expected, run, 4.0)["tokens"] > 0


async def test_preempted_rows_generate_what_they_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks for three sequences that need three each; every bit is as it is with room for all."""
    waves = [[Request(prompt(seed, 30), greedy(12)) for seed in (4, 5, 6)]]
    with gpu(monkeypatch):
        roomy = await generate(LLAMA, waves, device="cuda")
        block = 2 * 2 * 2 * 16 * 64 * 2
        tight = await generate(
            LLAMA, waves, device="cuda", max_model_len=48, kv_cache_memory_bytes=4 * block, enable_prefix_caching=False
        )
    assert tight.num_preemptions > 0 and roomy.num_preemptions == 0
    assert tight.outputs == roomy.outputs
    assert tight.problems == []


async def test_a_seed_gives_the_same_tokens_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=50, seed=7, max_tokens=8, ignore_eos=True, repetition_penalty=1.2
    )
    alone = [[Request(prompt(8, 21), params)]]
    crowd = [[Request(prompt(9, 33), greedy(8)), Request(prompt(8, 21), params), Request(prompt(2, 3), greedy(9))]]
    with gpu(monkeypatch):
        first = await generate(LLAMA, alone, device="cuda")
        second = await generate(LLAMA, crowd, device="cuda", max_num_batched_tokens=16)
    assert first.outputs[0] == second.outputs[1]


def ruled(max_tokens: int, **rules: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **rules)


async def test_rules_reach_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Margins of tens of logits: both devices must do exactly this."""
    allowed = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, allowed_token_ids=[40, 50], logit_bias={40: 99.0}
    )
    repelled = SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True, logit_bias={7: 100.0, 8: 60.0, 9: 20.0}, repetition_penalty=1.6
    )
    early = SamplingParams(
        temperature=0.0, max_tokens=5, min_tokens=3, stop_token_ids=[30], logit_bias={30: 99.0, 31: 60.0}
    )
    waves = [[Request(prompt(0, 5), params) for params in (allowed, repelled, early)]]
    expected = await generate(LLAMA, waves, device="cpu")
    with gpu(monkeypatch):
        run = await generate(LLAMA, waves, device="cuda")
    ids = [choices[0].token_ids for choices in run.outputs]
    assert ids == [choices[0].token_ids for choices in expected.outputs]
    assert ids[0] == [40] * 4 and ids[1][:2] == [7, 7] and ids[2] == [31, 31, 31, 30]


async def test_smollm2(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths of 576 and 1,536, 9 heads over 3: no power of two, and tied embeddings."""
    model = cut_smollm2(smollm2, tmp_path / "model")
    waves = [[Request(prompt(0, 20, VOCAB), greedy(4)), Request(prompt(1, 7, VOCAB), greedy(4, prompt_logprobs=0))]]
    expected = await generate(model, waves, device="cpu")
    with gpu(monkeypatch):
        run = await generate(model, waves, device="cuda", max_num_batched_tokens=32)
    counts = assert_same_but_for_near_ties(expected, run, 0.2)
    assert counts["tokens"] >= 6
