"""The server's life: ports, health, reflection, drain, failure; and the unary calls."""

import asyncio
import os
import signal
import socket
from dataclasses import fields
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from engine.errors import ConfigError, DeviceFault, EngineStopped
from engine.observe.model_info import ModelInfo
from rpc.options import ServerOptions
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.server import Server
from tests.rpc.conftest import HealthStub, Served, ServerReflectionStub, Serving, code_of, read
from tests.rpc.fake_engine import INFO, FakeEngine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
HELLO = pb.GenerateRequest(text="hi", request_id="r")


async def test_port_zero_returns_the_port_that_listens(served: Served) -> None:
    assert served.port > 0
    with socket.create_connection(("127.0.0.1", served.port)):
        pass


async def test_a_taken_port_is_an_error_that_names_it(served: Served) -> None:
    second = Server(FakeEngine(), ServerOptions(port=served.port, http_port=None))
    with pytest.raises(OSError, match=rf"^cannot listen on 127\.0\.0\.1:{served.port}: address already in use$"):
        await second.start()


async def test_nobody_can_share_the_port(served: Served) -> None:
    """With SO_REUSEPORT on, Linux would give a second server half of the calls."""
    with socket.socket() as second:
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            second.bind(("127.0.0.1", served.port))
            second.listen()


async def test_a_port_held_by_something_else_is_an_error_that_names_it() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"^cannot listen on 127\.0\.0\.1:{port}: address already in use$"):
            await Server(FakeEngine(), ServerOptions(port=port, http_port=None)).start()


async def test_a_signal_before_the_engine_is_asked_to_load_ends_the_server() -> None:
    engine = FakeEngine()
    engine.may_load.clear()
    server = Server(engine, ServerOptions(port=0, http_port=None))
    await server.start()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)
    await server.run()


async def test_the_end_of_a_drained_engine_is_no_failure(serving: Serving) -> None:
    """An engine stops by itself when the grace time is over."""
    async with serving() as served:
        served.server.stop()
        await served.engine.draining.wait()
        served.engine.failure.set_result(EngineStopped("the engine has stopped"))
        served.engine.all_ended.set()
        await served.run


async def test_a_host_that_is_not_here_is_an_error_that_names_it() -> None:
    with pytest.raises(OSError, match=r"^cannot listen on 192\.0\.2\.1:0: "):
        await Server(FakeEngine(), ServerOptions(host="192.0.2.1", port=0, http_port=None)).start()


@pytest.mark.parametrize("service", ["", "engine.v1.Engine"])
async def test_health_follows_the_engine(serving: Serving, service: str) -> None:
    engine = FakeEngine()
    engine.may_load.clear()
    async with (
        serving(engine, wait=False) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel,
    ):
        health = HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=service))
        assert (await read(watch)).status == NOT_SERVING
        engine.may_load.set()
        assert (await read(watch)).status == SERVING
        call = served.client.generate(HELLO)
        submission = await engine.submissions.get()
        served.server.stop()
        assert (await read(watch)).status == NOT_SERVING
        checked = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert checked.status == NOT_SERVING  # the port is still open while draining
        submission.finish()
        engine.all_ended.set()
        assert [len(r.deltas) async for r in call] == [1]


async def test_nothing_is_served_before_the_engine_is_ready(serving: Serving) -> None:
    engine = FakeEngine()
    engine.may_load.clear()
    async with serving(engine, wait=False) as served:
        assert await code_of(served.client.generate(HELLO).read()) is grpc.StatusCode.UNAVAILABLE
        assert await code_of(served.client.info()) is grpc.StatusCode.UNAVAILABLE
        assert await code_of(served.client.tokenize("x")) is grpc.StatusCode.UNAVAILABLE


async def test_a_signal_while_loading_ends_the_server(serving: Serving) -> None:
    engine = FakeEngine()
    engine.may_load.clear()
    async with serving(engine, wait=False) as served:
        assert await code_of(served.client.info()) is grpc.StatusCode.UNAVAILABLE
        os.kill(os.getpid(), signal.SIGTERM)
        await served.run


async def test_an_engine_that_cannot_load_ends_the_server_with_its_error(serving: Serving) -> None:
    engine = FakeEngine()
    engine.load_error = ConfigError("kv_cache_memory_bytes: 1 is less than one block")
    async with serving(engine, wait=False) as served:
        with pytest.raises(ConfigError, match="one block"):
            await served.run


async def test_a_failing_engine_ends_the_server_with_its_error(serving: Serving) -> None:
    async with serving() as served:
        call = served.client.generate(HELLO)
        await served.engine.submissions.get()
        served.engine.fail(DeviceFault("worker exited with 9"))
        assert await code_of(call.read()) is grpc.StatusCode.INTERNAL
        with pytest.raises(DeviceFault, match="worker exited with 9"):
            await served.run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_live_streams_finish(serving: Serving, number: signal.Signals) -> None:
    async with serving(grace=12.5) as served:
        call = served.client.generate(HELLO)
        submission = await served.engine.submissions.get()
        os.kill(os.getpid(), number)
        await served.engine.draining.wait()
        assert served.engine.grace == 12.5
        refused = served.client.generate(pb.GenerateRequest(text="late"))
        assert await code_of(refused.read()) is grpc.StatusCode.UNAVAILABLE
        submission.push("to the ", [5])
        submission.finish("end", [6])
        served.engine.all_ended.set()
        assert "".join([r.deltas[0].text async for r in call]) == "to the end"
        await served.run


async def test_live_requests_can_be_aborted_while_draining(serving: Serving) -> None:
    async with serving() as served:
        call = served.client.generate(HELLO)
        await served.engine.submissions.get()
        served.server.stop()
        await served.engine.draining.wait()
        assert await served.client.abort("r") is True
        assert (await read(call)).deltas[0].finish_reason == pb.FINISH_REASON_ABORT
        served.engine.all_ended.set()
        await served.run


async def test_when_the_grace_time_is_over_the_rest_ends_with_a_status(serving: Serving) -> None:
    async with serving() as served:
        call = served.client.generate(HELLO)
        (await served.engine.submissions.get()).push("a", [5])
        served.server.stop()
        await served.engine.draining.wait()
        served.engine.grace_over.set()
        assert (await read(call)).deltas[0].text == "a"
        assert await code_of(call.read()) is grpc.StatusCode.UNAVAILABLE
        await served.run


async def test_a_second_signal_stops_at_once(serving: Serving) -> None:
    async with serving() as served:
        call = served.client.generate(HELLO)
        await served.engine.submissions.get()
        os.kill(os.getpid(), signal.SIGTERM)
        await served.engine.draining.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await served.run  # although neither the stream nor the grace time has ended
        assert await code_of(call.read()) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class SlowClient:
    """The context of a call whose client does not read until told to."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()
        self.reads = asyncio.Event()

    def time_remaining(self) -> None:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"

    async def write(self, response: pb.GenerateResponse) -> None:
        self.writing.set()
        await self.reads.wait()


async def test_a_drain_waits_for_a_slow_reader_of_a_finished_request() -> None:
    engine, client = FakeEngine(), SlowClient()
    context: Any = client
    server = Server(engine, ServerOptions(port=0, http_port=None))
    async with engine:
        call = asyncio.create_task(server._servicer.Generate(HELLO, context))
        (await engine.submissions.get()).finish("end")
        await client.writing.wait()
        drain = asyncio.create_task(server._drain())
        await engine.drained.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not drain.done()
        client.reads.set()
        await asyncio.gather(drain, call)


async def test_the_port_is_free_after_the_end(serving: Serving) -> None:
    async with serving() as served:
        served.server.stop()
        await served.run
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", served.port))


async def test_reflection_lists_the_services(served: Served) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        stub = ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async for reply in stub.ServerReflectionInfo(iter([ask])):
            names = {service.name for service in reply.list_services_response.service}
    assert {"engine.v1.Engine", "grpc.health.v1.Health"} <= names


FACTS = {f.name for f in fields(ModelInfo)} - {"served_model_names"} | {"served_model_name"}


async def test_get_info(served: Served) -> None:
    assert {f.name for f in pb.GetInfoResponse.DESCRIPTOR.fields} == FACTS
    info = await served.client.info()
    assert {f.name: getattr(info, f.name) for f in pb.GetInfoResponse.DESCRIPTOR.fields} == {
        name: getattr(INFO, name) for name in FACTS
    }


async def test_tokenize_and_detokenize(served: Served) -> None:
    assert await served.client.tokenize("ab") == [1, 97, 98]
    assert await served.client.tokenize("ab", add_special_tokens=False) == [97, 98]
    assert await served.client.detokenize([104, 233]) == "hé"


async def test_tokenize_renders_a_chat(served: Served) -> None:
    ids = await served.client.render_chat([{"role": "user", "content": "q"}])
    assert await served.client.detokenize(ids) == "<user>q<assistant>"


async def test_abort(served: Served) -> None:
    call = served.client.generate(HELLO)
    await served.engine.submissions.get()
    assert await served.client.abort("another") is False
    assert await served.client.abort("r") is True
    assert (await read(call)).deltas[0].finish_reason == pb.FINISH_REASON_ABORT
    assert await call.read() is grpc.aio.EOF


async def test_abort_needs_an_id(served: Served) -> None:
    assert await code_of(served.client.abort("")) is grpc.StatusCode.INVALID_ARGUMENT


async def test_waiting_for_a_server_that_is_not_there_times_out(served: Served) -> None:
    served.server.stop()
    await served.run
    with pytest.raises(TimeoutError):
        await served.client.wait_serving(0.05)
