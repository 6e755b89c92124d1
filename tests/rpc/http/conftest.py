"""The HTTP interface of a server over a fake engine, and a client that talks to its port."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.rpc.conftest import Served, Serving
from tests.rpc.fake_engine import FakeEngine, Submission


@dataclass
class Http:
    """A running server and an HTTP client of it."""

    served: Served
    client: httpx.AsyncClient

    @property
    def engine(self) -> FakeEngine:
        return self.served.engine

    async def next_request(self) -> Submission:
        """The next request that reaches the engine."""
        return await self.engine.submissions.get()

    async def refusal(self, path: str, **body: Any) -> tuple[int, str | None, str]:
        """Status, param and message of a POST that fails."""
        answer = await self.client.post(path, json=body)
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return answer.status_code, error["param"], error["message"]


HttpServing = Callable[..., AbstractAsyncContextManager[Http]]


@pytest.fixture(scope="session")
def http_serving(serving: Serving) -> HttpServing:
    """`async with http_serving(engine, **options) as http`."""

    @asynccontextmanager
    async def serve(engine: FakeEngine | None = None, **options: Any) -> AsyncIterator[Http]:
        async with (
            serving(engine, http_port=0, **options) as served,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{served.server.http_port}", timeout=30, verify=False
            ) as client,
        ):
            yield Http(served, client)

    return serve


@pytest.fixture
async def http(http_serving: HttpServing) -> AsyncIterator[Http]:
    async with http_serving() as http:
        yield http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_http(http_serving: HttpServing) -> AsyncIterator[Http]:
    """One server for many cases that leave nothing behind; they run in the module's loop."""
    async with http_serving() as http:
        yield http
