"""The server over a fake engine, as tests/rpc has it, and `engine serve` without one."""

import pytest

from engine.cli import main as cli
from engine.config import EngineConfig
from rpc.options import ServerOptions
from tests.rpc.conftest import serving

__all__ = ["serving"]

Started = list[tuple[EngineConfig, ServerOptions]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What `engine serve` would have started."""
    calls: Started = []

    async def start(config: EngineConfig, options: ServerOptions) -> None:
        calls.append((config, options))

    monkeypatch.setattr(cli, "_serve", start)
    return calls
