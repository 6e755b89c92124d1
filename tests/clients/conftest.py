"""The demo model behind `engine serve`, for clients that other people wrote."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tests.rpc.real import Addresses, http_server_process

MODEL = "SmolLM2-135M-Instruct"
GOLDEN_FILE = np.load(GOLDEN / "smollm2-135m-instruct" / "golden.npz")


@pytest.fixture(scope="session")
def demo_server(smollm2: Path) -> Iterator[Addresses]:
    """It answers requests, in float32, whose numbers are the golden ones."""
    with http_server_process(smollm2, "--max-model-len", "1024") as addresses:
        yield addresses
