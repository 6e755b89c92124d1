"""The naive reference against the golden files of another implementation; see tests/golden/README.md.

Both sides are independent of the engine. What holds here licenses the engine's tests to compare with
`tests.reference`.
"""

from pathlib import Path

import numpy as np
import pytest

from loader.checkpoint import open_checkpoint
from loader.weights import plan_weights
from tests.loader.files import GOLDEN
from tests.reference import reference_greedy, reference_logits

PROMPTS = range(7)
FLOAT32_NOISE = 1e-4
"""Share of the logits' deviation; found 2.4e-5."""

tiny_folders = pytest.mark.parametrize(
    "path", sorted(path.parent for path in GOLDEN.glob("*/model.safetensors")), ids=lambda path: path.name
)


@tiny_folders
def test_logits(path: Path) -> None:
    checkpoint, golden = open_checkpoint(path), np.load(path / "golden.npz")
    weights = plan_weights(path, checkpoint.decoder)
    for k in PROMPTS:
        expected = golden[f"logits_{k}"]
        found = reference_logits(checkpoint.decoder, weights, golden[f"prompt_{k}"])
        assert np.abs(found - expected).max() < FLOAT32_NOISE * expected.std()


@tiny_folders
def test_greedy_ids(path: Path) -> None:
    checkpoint, golden = open_checkpoint(path), np.load(path / "golden.npz")
    weights = plan_weights(path, checkpoint.decoder)
    for k in PROMPTS:
        prompt, greedy = golden[f"prompt_{k}"], golden[f"greedy_{k}"]
        logits = reference_logits(checkpoint.decoder, weights, [*prompt, *greedy])
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
