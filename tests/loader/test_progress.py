"""Progress: counts bytes on stderr, and stays silent where nobody watches."""

import pytest

from loader.progress import Lines, byte_progress


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


def test_a_line_now_and_then_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 1.0, 6.0, 6.0, 7.0, 12.0, 12.0))
    lines = Lines("Importing", 40 << 20, lambda: next(times))
    for _ in range(4):
        lines(10 << 20)
    assert capfd.readouterr() == ("", "Importing: 20 of 40 MiB, 50%\nImporting: 40 of 40 MiB, 100%\n")
