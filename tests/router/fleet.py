"""Engines in processes of their own and the real `smg` router in front of them, on free loopback ports."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from rpc.client import Client
from tests.rpc.real import server_process

DEADLINE = 60.0


@dataclass
class Worker:
    """One engine."""

    process: subprocess.Popen[str]
    client: Client
    address: str

    @property
    def url(self) -> str:
        """As the router knows it."""
        return f"grpc://{self.address}"


class RouterLog:
    """What the router prints, read by a thread so that its pipe never fills."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: list[str] = []
        self._news = threading.Condition()
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._news:
                self._lines.append(re.sub(r"\x1b\[[0-9;]*m", "", line))
                self._news.notify_all()

    def wait_for(self, text: str, count: int) -> None:
        """Until `text` was printed `count` times."""
        with self._news:
            found = self._news.wait_for(lambda: sum(text in line for line in self._lines) >= count, DEADLINE)
        assert found, "".join(self._lines)


@dataclass
class Fleet:
    """A router and its workers."""

    model: str
    workers: list[Worker]
    log: RouterLog
    openai: AsyncOpenAI
    http: httpx.AsyncClient
    metrics_url: str

    async def metric(self, name: str, worker: Worker) -> float:
        """A number that the router exports about a worker."""
        text = (await self.http.get(self.metrics_url)).text
        found = re.search(rf'^{name}{{[^}}]*worker="{re.escape(worker.url)}"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again until the answer is yes; each question is a call, which gives the others their turn."""
    async with asyncio.timeout(DEADLINE):
        while not await condition():
            pass


@asynccontextmanager
async def running_fleet(model: Path, num_workers: int = 2) -> AsyncIterator[Fleet]:
    """Ready when the router knows what every worker has cached. Everything is stopped at the end."""
    async with AsyncExitStack() as stack:
        processes = [stack.enter_context(server_process(model)) for _ in range(num_workers)]
        workers = []
        for process, address in processes:
            client = await stack.enter_async_context(Client(address))
            await client.wait_serving(DEADLINE)
            workers.append(Worker(process, client, address))
        port, metrics_port = _free_ports(2)
        router = subprocess.Popen(
            [
                sys.executable, "-m", "smg.cli", "launch", "--host", "127.0.0.1", "--port", str(port),
                "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
                "--worker-startup-check-interval", "1", "--worker-urls", *(w.url for w in workers),
            ],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        stack.callback(_stop, router)
        log = RouterLog(router)
        await asyncio.to_thread(log.wait_for, "snapshot applied", num_workers)
        url = f"http://127.0.0.1:{port}"
        openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)
        await stack.enter_async_context(openai)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=DEADLINE))
        yield Fleet(model.name, workers, log, openai, http, f"http://127.0.0.1:{metrics_port}/metrics")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; the router cannot take port 0."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
