"""The naive reference against the golden files of another implementation; see tests/golden/README.md.

Both sides are independent of the engine. What holds here licenses the engine's tests to compare with
`tests.reference` at exact frequencies.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from loader.checkpoint import open_checkpoint
from loader.weights import plan_weights
from tests.loader.files import GOLDEN
from tests.reference import FLOAT64, reference_greedy, reference_logits

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PROMPTS = range(7)
FLOAT32_NOISE = 1e-4
"""Share of the logits' deviation; found 2.4e-5."""

llama_folders = pytest.mark.parametrize("path", sorted(GOLDEN.glob("llama*")), ids=lambda path: path.name)


def worst_difference(path: Path, frequency_dtype: np.dtype[Any]) -> float:
    checkpoint, golden = open_checkpoint(path), np.load(path / "golden.npz")
    weights = plan_weights(path, checkpoint.decoder)
    worst = 0.0
    for k in PROMPTS:
        found = reference_logits(checkpoint.decoder, weights, golden[f"prompt_{k}"], frequency_dtype)
        expected = golden[f"logits_{k}"]
        worst = max(worst, np.abs(found - expected).max() / expected.std())
    return worst


@llama_folders
def test_llama_logits_with_the_frequencies_of_the_golden_files(path: Path) -> None:
    assert worst_difference(path, BFLOAT16) < FLOAT32_NOISE


@llama_folders
def test_llama_golden_files_have_rounded_frequencies(path: Path) -> None:
    """If this fails, the files were made anew: compare the engine with them directly and drop the README's table."""
    assert worst_difference(path, FLOAT64) > 0.04


@llama_folders
def test_llama_greedy_ids(path: Path) -> None:
    checkpoint, golden = open_checkpoint(path), np.load(path / "golden.npz")
    weights = plan_weights(path, checkpoint.decoder)
    for k in PROMPTS:
        prompt, greedy = golden[f"prompt_{k}"], golden[f"greedy_{k}"]
        logits = reference_logits(checkpoint.decoder, weights, [*prompt, *greedy], BFLOAT16)
        assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == greedy.tolist()


def test_reference_greedy_is_the_argmax_step_by_step() -> None:
    path = GOLDEN / "llama-bias"
    checkpoint, golden = open_checkpoint(path), np.load(path / "golden.npz")
    weights = plan_weights(path, checkpoint.decoder)
    ids = reference_greedy(checkpoint.decoder, weights, golden["prompt_0"], 4)
    assert ids == golden["greedy_0"][:4].tolist()


def test_smollm2(smollm2: Path) -> None:
    """Imported weights, exact frequencies: last logits, prompt logprobs, 48 greedy ids with the end token banned."""
    checkpoint = open_checkpoint(smollm2)
    weights = plan_weights(smollm2, checkpoint.decoder)
    golden = np.load(GOLDEN / "smollm2-135m-instruct" / "golden.npz")
    for k in range(5):
        prompt, greedy = golden[f"prompt_{k}"], golden[f"greedy_{k}"]
        logits = reference_logits(checkpoint.decoder, weights, [*prompt, *greedy])
        n = len(prompt)
        last = golden[f"last_logits_{k}"]
        assert np.abs(logits[n - 1] - last).max() < FLOAT32_NOISE * last.std()
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found = logprobs[np.arange(n - 1), prompt[1:]]
        assert np.abs(found - golden[f"prompt_logprobs_{k}"]).max() < 1e-3
        logits[:, checkpoint.generation.eos_token_ids] = -np.inf
        assert logits.argmax(-1)[n - 1 : -1].tolist() == greedy.tolist()
