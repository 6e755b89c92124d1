"""What a norm's epsilon and a rotary angle must be, at the values where getting them wrong shows."""

from dataclasses import replace

import numpy as np
import pytest

from engine.devices.cpu.model import rotary_table
from loader.decoder import RopeConfig
from tests.devices.driver import GREEDY, TINY, Driver, LoudWeights, open_executor
from tests.reference import reference_logits


class FaintWeights(LoudWeights):
    """Embeddings so small that the first norm's epsilon decides."""

    def tensor(self, name: str) -> np.ndarray:
        return super().tensor(name) * np.float32(1e-4 if "embed_tokens" in name else 1.0)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-3])
def test_norms_use_the_configs_epsilon_inside_the_root(eps: float) -> None:
    """N05: rows of about 1e-4; the reference is float64."""
    decoder = replace(TINY, rms_norm_eps=eps)
    weights, prompt = FaintWeights(decoder), list(range(3, 20))
    wanted = reference_logits(decoder, weights, prompt)
    other = reference_logits(replace(decoder, rms_norm_eps=2 * eps), weights, prompt)
    with open_executor(decoder, weights) as executor:
        driver = Driver(executor)
        driver.add(0, prompt, replace(GREEDY, num_prompt_logprobs=0))
        row = driver.run(0, chunk=256, outputs=1)
    logits = np.stack([row.logits[i] for i in range(len(prompt))])
    assert np.abs(logits - wanted).max() < 1e-4 * wanted.std() < 0.1 * np.abs(other - wanted).max()


def test_angles_of_late_positions_are_exact() -> None:
    """N06: the table is float32 of float64 angles whatever the model's dtype."""
    decoder = replace(TINY, head_dim=64, rope=RopeConfig(kind="default", theta=10000.0), max_position_embeddings=131072)
    table = rotary_table(decoder, 131072)
    for position in (256, 257, 4095, 131071):
        angles = position / 10000.0 ** (np.arange(0, 64, 2) / 64)
        np.testing.assert_allclose(table[position], [np.cos(angles), np.sin(angles)], rtol=0, atol=1e-6)
    assert np.abs(table[256] - table[257]).max() > 0.1
