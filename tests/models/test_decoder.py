"""The decoder's op sequence against the naive reference, which knows nothing of ops."""

import numpy as np
import pytest

from loader.checkpoint import open_checkpoint
from loader.weights import plan_weights
from tests.conftest import GOLDEN
from tests.models.numpy_ops import numpy_logits
from tests.reference import reference_logits


@pytest.mark.parametrize("name", ["llama", "llama-bias", "llama-mha-tied", "llama-rope-yarn"])
def test_decoder_over_numpy_ops_is_the_reference(name: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    weights = plan_weights(checkpoint.path, checkpoint.decoder)
    ids = np.load(GOLDEN / name / "golden.npz")["prompt_4"].tolist()
    expected = reference_logits(checkpoint.decoder, weights, ids)
    np.testing.assert_allclose(numpy_logits(checkpoint.decoder, weights, ids), expected, rtol=1e-10, atol=1e-10)
