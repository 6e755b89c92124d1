"""The demo model behind `engine serve`, for clients that other people wrote."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rpc.client import Client
from tests.conftest import GOLDEN
from tests.rpc.real import server_process

MODEL = "SmolLM2-135M-Instruct"
GOLDEN_FILE = np.load(GOLDEN / "smollm2-135m-instruct" / "golden.npz")


@dataclass(frozen=True)
class Addresses:
    """Where the server listens."""

    grpc: str
    http: str


@pytest.fixture(scope="session")
def demo_server(smollm2: Path) -> Iterator[Addresses]:
    """It answers requests, in float32, whose numbers are the golden ones."""
    with server_process(smollm2, "--http-port", "0", "--max-model-len", "1024") as (process, address):
        assert process.stdout is not None
        http = process.stdout.readline().removeprefix("http on ").strip()

        async def wait() -> None:
            async with Client(address) as client:
                await client.wait_serving(60)

        asyncio.run(wait())
        yield Addresses(address, http)
