"""SmolLM2 in bfloat16 through the offline API, against the golden file of another implementation in float32."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine import LLM, SamplingParams
from tests.system.harness import values
from tests.system.test_golden import FILE, GREEDY, PROMPTS, SETTINGS, TEXTS

BF16_BOUND = 0.5
"""Bound on the error of a bfloat16 logit or logprob here; 0.04 was measured on the prompts' logprobs."""


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(model=str(smollm2), dtype="bfloat16", **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize("k", range(5))
def test_bfloat16_offline(llm: LLM, k: int) -> None:
    """The first token is float32's where its margin exceeds what rounding can move; text goes in here."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=0, logprobs=2)
    (out,) = llm.generate(TEXTS[k], params, use_tqdm=False)
    assert out.prompt_token_ids == PROMPTS[k]
    logits = FILE[f"last_logits_{k}"]
    second, best = np.sort(logits)[-2:]
    (choice,) = out.outputs
    if best - second > 2 * BF16_BOUND:
        assert choice.token_ids[0] == GREEDY[k][0]
    else:
        assert logits[choice.token_ids[0]] > best - 2 * BF16_BOUND
    assert out.prompt_logprobs is not None and choice.logprobs is not None and len(choice.logprobs) == 24
    assert np.abs(np.array(values(out.prompt_logprobs)) - FILE[f"prompt_logprobs_{k}"]).max() < BF16_BOUND


def test_bfloat16_keeps_clear_decisions() -> None:
    """The test above is not empty: most of the prompts have a clear winner."""
    margins = [float(np.diff(np.sort(FILE[f"last_logits_{k}"])[-2:])[0]) for k in range(5)]
    assert sum(margin > 2 * BF16_BOUND for margin in margins) >= 3


def test_offline_takes_lists_and_keeps_order(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=k + 1, ignore_eos=True) for k in range(5)]
    outs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outs] == [1, 2, 3, 4, 5]
    assert [o.prompt_token_ids for o in outs] == PROMPTS


def test_offline_cache_and_reset(llm: LLM) -> None:
    prompt = {"prompt_token_ids": np.random.default_rng(5).integers(100, 40000, 33).tolist()}
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    outs = [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2)]
    assert [o.num_cached_tokens for o in outs] == [0, 32]
    salted = llm.generate({**prompt, "cache_salt": "s"}, params, use_tqdm=False)[0]
    assert (salted.num_cached_tokens, salted.outputs) == (0, outs[0].outputs)
    llm.reset_prefix_cache()
    outs += llm.generate(prompt, params, use_tqdm=False)
    assert outs[2].num_cached_tokens == 0
    assert outs[0].outputs == outs[1].outputs == outs[2].outputs
