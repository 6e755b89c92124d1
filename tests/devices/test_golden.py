"""The executor against outputs of another implementation, with a pool full of NaN and scattered blocks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loader.checkpoint import open_checkpoint
from loader.weights import plan_weights
from tests.conftest import GOLDEN
from tests.devices.driver import GREEDY, Driver, open_executor
from tests.loader.test_weights import edited
from tests.reference import reference_logits

GREEDY_WITH_PROMPT = replace(GREEDY, num_prompt_logprobs=0)
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("name", NAMES)
def test_logits_at_every_position_and_greedy_ids(name: str, chunk: int) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    golden = np.load(GOLDEN / name / "golden.npz")
    weights = plan_weights(checkpoint.path, checkpoint.decoder)
    with open_executor(checkpoint.decoder, weights) as executor:
        driver = Driver(executor)
        for k in range(7):
            prompt, expected = golden[f"prompt_{k}"], golden[f"logits_{k}"]
            driver.add(3, prompt, GREEDY_WITH_PROMPT)
            row = driver.run(3, chunk=chunk, outputs=24)
            logits = np.stack([row.logits[i] for i in range(len(prompt))])
            assert np.abs(logits - expected).max() < 2e-3 * expected.std()
            assert row.sampled == golden[f"greedy_{k}"].tolist()
            driver.drop(3)


def mix_dtypes(tensors: dict[str, np.ndarray]) -> None:
    """Norms in float32 and the embedding in float16, with values that bfloat16 does not have."""
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = tensor.astype(np.float32) * np.float32(1.003)
    embedding = tensors["model.embed_tokens.weight"].astype(np.float32)
    tensors["model.embed_tokens.weight"] = (embedding * np.float32(1.003)).astype(np.float16)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_a_checkpoint_of_several_dtypes(tmp_path: Path, dtype: str, bound: float) -> None:
    """Each tensor is read in its own; what is computed in, and the memory for it, stay as configured."""
    plain, mixed = GOLDEN / "llama", edited(GOLDEN / "llama", tmp_path / "mixed", mix_dtypes)
    decoder = open_checkpoint(mixed).decoder
    prompt = np.load(plain / "golden.npz")["prompt_6"]
    expected = reference_logits(decoder, plan_weights(mixed, decoder), prompt.tolist())
    nbytes = []
    for folder in (plain, mixed):
        with open_executor(decoder, plan_weights(folder, decoder), dtype=dtype) as executor:
            driver = Driver(executor)
            driver.add(0, prompt, GREEDY_WITH_PROMPT)
            row = driver.run(0, chunk=256, outputs=1)
            nbytes.append(executor.model._kept[0].nbytes)
    logits = np.stack([row.logits[i] for i in range(len(prompt))])
    assert np.abs(logits - expected).max() < bound * expected.std()
    assert nbytes[0] == nbytes[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2(smollm2: Path, dtype: str) -> None:
    """float32 reproduces the file; bfloat16, whose activations are rounded too, stays near it."""
    checkpoint = open_checkpoint(smollm2)
    golden = np.load(GOLDEN / "smollm2-135m-instruct" / "golden.npz")
    weights = plan_weights(smollm2, checkpoint.decoder)
    with open_executor(checkpoint.decoder, weights, dtype=dtype, max_model_len=128) as executor:
        driver = Driver(executor)
        for k in range(5):
            prompt = golden[f"prompt_{k}"]
            row = driver.add(0, prompt, GREEDY_WITH_PROMPT)
            result = driver.step({0: len(prompt)}, prompt_logprobs=True)
            assert result.prompt_logprobs is not None
            difference = result.prompt_logprobs.logprobs - golden[f"prompt_logprobs_{k}"]
            assert np.abs(difference).max() < (0.02 if dtype == "float32" else 0.5)
            if dtype == "float32":
                assert driver.run(0, chunk=1, outputs=24).sampled == golden[f"greedy_{k}"][:24].tolist()
            assert row.computed >= len(prompt)
            driver.drop(0)
