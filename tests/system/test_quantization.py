"""int8 weights and activations on the demo model: what rounding costs, and what stays the same."""

from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.devices.cpu.numkong import has_int8_dot
from perf.perplexity import perplexity

pytestmark = pytest.mark.skipif(not has_int8_dot(), reason="the processor has no AVX512-VNNI, int8 is refused there")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def test_perplexity_hardly_moves(smollm2: Path) -> None:
    """perf/results/perplexity.json has all the texts; four of them spread more."""
    exact, rounded = (perplexity({"quantization": kind}, texts=4) for kind in ("auto", "int8"))
    assert abs(rounded / exact - 1) < 0.01


def test_ids_do_not_depend_on_company(smollm2: Path) -> None:
    prompts = ["The capital of France is", "Once upon a time", "1, 2, 3, 4,", "def main():"]
    with LLM(model=str(smollm2), max_model_len=256, quantization="int8", device="cpu") as llm:
        together = [r.outputs[0].token_ids for r in llm.generate(prompts, GREEDY, use_tqdm=False)]
        llm.reset_prefix_cache()
        alone = [llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    assert together == alone
    assert all(len(set(ids)) > 3 for ids in alone)
