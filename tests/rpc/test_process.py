"""`engine serve` with a real model in a process of its own: signals with live streams, death, a hang."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from rpc.client import Client
from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.conftest import HealthStub, read
from tests.rpc.real import children_of, make_checkpoint, server_process

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STREAMS = 8

WorkerOf = Callable[["subprocess.Popen[str]"], int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def serving(model: Path, *flags: str) -> AsyncIterator[tuple[subprocess.Popen[str], Client, str]]:
    """A server that serves."""
    with server_process(model, *flags) as (process, address):
        async with Client(address) as client:
            await client.wait_serving(60)
            yield process, client, address


async def streams(client: Client, max_tokens: int) -> list[grpc.aio.UnaryStreamCall]:
    """Eight of them, each with its first token out."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    prompts = [pb.TokenIds(ids=[i, 6, 7]) for i in range(STREAMS)]
    calls = [client.generate(pb.GenerateRequest(token_ids=p, sampling=sampling)) for p in prompts]
    for call in calls:
        await call.read()
    return calls


async def end_of(call: grpc.aio.UnaryStreamCall) -> tuple[int, object]:
    """Tokens after the first message, and the finish reason or status."""
    num_tokens, reason = 0, None
    try:
        while (response := await read(call)) is not grpc.aio.EOF:
            for delta in response.deltas:
                num_tokens += len(delta.token_ids)
                reason = delta.finish_reason or reason
    except grpc.aio.AioRpcError as error:
        return num_tokens, error.code()
    return num_tokens, reason


async def exit_code(process: subprocess.Popen[str]) -> int:
    return await asyncio.to_thread(process.wait, 60)


async def statuses(address: str) -> AsyncGenerator[int, None]:
    async with grpc.aio.insecure_channel(address) as channel:
        async for reply in HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            yield reply.status


async def test_thousands_of_calls_at_once_are_served_or_refused_by_the_engine(model: Path) -> None:
    """grpc itself would cancel some of more than a thousand that wait for Python."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=1))

    async def outcome() -> object:
        return (await end_of(client.generate(request)))[1]

    async with serving(model, "--max-queued-requests", "500") as (_, client, _):
        outcomes = Counter(await asyncio.gather(*(outcome() for _ in range(2500))))
    assert outcomes.keys() <= {pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert outcomes.total() == 2500


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_live_streams_finish_within_the_grace_time(model: Path, number: signal.Signals) -> None:
    async with serving(model, "--grace", "120") as (process, client, address):
        calls = await streams(client, 150)
        watch = statuses(address)
        assert await anext(watch) == SERVING
        process.send_signal(number)
        assert await anext(watch) == NOT_SERVING
        late = await end_of(client.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]))))
        assert late == (0, grpc.StatusCode.UNAVAILABLE)
        ends = await asyncio.gather(*map(end_of, calls))
        assert {reason for _, reason in ends} == {pb.FINISH_REASON_LENGTH}
        assert await exit_code(process) == 0
        await watch.aclose()


async def test_when_the_grace_time_is_over_streams_end_with_a_status(model: Path) -> None:
    async with serving(model, "--grace", "0.2") as (process, client, _):
        calls = await streams(client, 8000)
        process.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(*map(end_of, calls))
        assert {reason for _, reason in ends} == {grpc.StatusCode.UNAVAILABLE}
        assert await exit_code(process) == 0


async def test_a_second_signal_ends_it_at_once(model: Path) -> None:
    async with serving(model, "--grace", "3600") as (process, client, address):
        calls = await streams(client, 8000)
        watch = statuses(address)
        assert await anext(watch) == SERVING
        process.send_signal(signal.SIGTERM)
        assert await anext(watch) == NOT_SERVING
        process.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(*map(end_of, calls))
        assert {reason for _, reason in ends} <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        assert await exit_code(process) == 0
        await watch.aclose()


async def test_a_signal_during_load_ends_it(model: Path) -> None:
    with server_process(model) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert await exit_code(process) == 0


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"


@pytest.mark.parametrize(
    ("weights", "says"),
    [(POINTER, "/model.safetensors: is a git-LFS pointer"), (None, ": has neither model.safetensors nor ")],
    ids=["pointer", "none"],
)
async def test_a_model_that_cannot_be_loaded_ends_the_process_with_1_and_one_line(
    tmp_path: Path, weights: bytes | None, says: str
) -> None:
    file = make_checkpoint(tmp_path) / "model.safetensors"
    file.unlink()
    if weights is not None:
        file.write_bytes(weights)
    with server_process(tmp_path) as (process, _):
        _, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith(f"engine: error: {tmp_path}{says}")
    assert "Traceback" not in err and " serving" not in err


async def test_what_is_no_model_is_said_before_anything_listens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine", "serve", str(tmp_path / "nowhere"), "--port", "0", "--no-http"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"engine: error: {tmp_path / 'nowhere'}: no such folder")


@pytest.fixture
def worker_of() -> Iterator[WorkerOf]:
    """Finds the device's process; one left behind is killed."""
    found: list[int] = []

    def find(process: subprocess.Popen[str]) -> int:
        names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children_of(process.pid)}
        (pid,) = (pid for pid, name in names.items() if "resource_tracker" not in name)
        found.append(pid)
        return pid

    yield find
    for pid in found:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


async def test_the_death_of_the_device_ends_the_process_with_1(model: Path, worker_of: WorkerOf) -> None:
    async with serving(model) as (process, client, _):
        calls = await streams(client, 8000)
        os.kill(worker_of(process), signal.SIGKILL)
        ends = await asyncio.gather(*map(end_of, calls))
        assert {reason for _, reason in ends} == {grpc.StatusCode.INTERNAL}
        assert await exit_code(process) == 1


async def test_the_death_of_an_idle_device_is_noticed_at_once(model: Path, worker_of: WorkerOf) -> None:
    async with serving(model) as (process, _, address):
        watch = statuses(address)
        assert await anext(watch) == SERVING
        os.kill(worker_of(process), signal.SIGKILL)
        assert await anext(watch) == NOT_SERVING
        await watch.aclose()
        assert await exit_code(process) == 1
        assert process.stderr is not None and "killed by SIGKILL" in process.stderr.read()


async def test_a_device_that_hangs_is_noticed_and_so_is_its_recovery(model: Path, worker_of: WorkerOf) -> None:
    async with serving(model, "--watchdog-seconds", "0.5") as (process, client, address):
        watch = statuses(address)
        assert await anext(watch) == SERVING
        calls = await streams(client, 8000)
        os.kill(worker_of(process), signal.SIGSTOP)
        assert await anext(watch) == NOT_SERVING
        os.kill(worker_of(process), signal.SIGCONT)
        assert await anext(watch) == SERVING
        for call in calls:
            call.cancel()
        await watch.aclose()


async def test_a_client_that_stops_answering_pings_is_given_up(model: Path) -> None:
    """It neither reads nor closes its connection, as behind a cut cable."""
    async with serving(model, "--keepalive-time", "1", "--keepalive-timeout", "0.5") as (_, client, address):
        flags = ("--address", address, "--max-tokens", "8000", "--ignore-eos")
        frozen = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine", "generate", "word-number-5", *flags, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert frozen.stdout is not None and await frozen.stdout.read(1)
            frozen.send_signal(signal.SIGSTOP)
            while (await client.stats()).num_running:
                await asyncio.sleep(0)
        finally:
            frozen.kill()
            await frozen.wait()
