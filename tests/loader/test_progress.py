"""Progress: counts every byte once, and stays silent where nobody watches."""

import numpy as np
import pytest

from loader.checkpoint import open_checkpoint
from loader.progress import byte_progress, read_weights
from loader.weights import plan_weights
from tests.loader.files import LLAMA


@pytest.fixture
def weights():  # type: ignore[no-untyped-def]
    return plan_weights(LLAMA, open_checkpoint(LLAMA).decoder)


@pytest.mark.parametrize("show", [None, False])
def test_silent_without_a_terminal(weights, show, capfd) -> None:  # type: ignore[no-untyped-def]
    found = dict(read_weights(weights, show))
    assert tuple(found) == weights.names
    assert all(np.array_equal(found[name], weights.tensor(name)) for name in found)
    assert capfd.readouterr() == ("", "")


def test_shown_on_stderr_when_asked(weights, capfd) -> None:  # type: ignore[no-untyped-def]
    assert sum(tensor.nbytes for _, tensor in read_weights(weights, True)) == weights.nbytes
    out, err = capfd.readouterr()
    assert out == "" and "Loading weights" in err and "1.0/1.0 MB" in err


def test_unknown_total(capfd) -> None:  # type: ignore[no-untyped-def]
    with byte_progress("Fetching", None, True) as advance:
        advance(3_000_000)
    assert "3.0/? MB" in capfd.readouterr().err
