"""Progress: counts bytes on stderr, and stays silent where nobody watches."""

import pytest

from loader.progress import byte_progress


@pytest.mark.parametrize("show", [None, False])
def test_silent_without_a_terminal(show: bool | None, capfd: pytest.CaptureFixture[str]) -> None:
    with byte_progress("Loading weights", 4, show) as advance:
        advance(4)
    assert capfd.readouterr() == ("", "")


def test_shown_on_stderr_when_asked(capfd: pytest.CaptureFixture[str]) -> None:
    with byte_progress("Loading weights", 8_000_000, True) as advance:
        advance(2_000_000)
        advance(3_000_000)
    out, err = capfd.readouterr()
    assert out == "" and "Loading weights" in err and "5.0/8.0 MB" in err
