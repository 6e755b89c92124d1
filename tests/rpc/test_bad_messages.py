"""Bytes that are no message: a status that says so, no traceback, and calls as they were beside it."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.conftest import HealthStub, Served, ServerReflectionStub, read

GARBAGE = [b"\xff\xff\xff", pb.GenerateRequest(text="hi").SerializeToString()[:-1], b"\x0a\x02\xc3\x28"]
"""No field's tag, a text that is cut off, and one that is not UTF-8."""


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_stream", "/engine.v1.Engine/Generate"),
        ("unary_unary", "/engine.v1.Engine/Tokenize"),
        ("unary_unary", "/grpc.health.v1.Health/Check"),
        ("unary_stream", "/grpc.health.v1.Health/Watch"),
        ("stream_stream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    ],
)
async def test_garbage_is_an_invalid_argument(
    served: Served, caplog: pytest.LogCaptureFixture, kind: str, method: str
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        for garbage in GARBAGE:
            request = iter([garbage]) if kind == "stream_stream" else garbage
            call = getattr(channel, kind)(method)(request)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if kind == "unary_unary" else call.read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith("request: ")
    assert not caplog.records
    assert served.engine.submissions.empty()


async def test_garbage_in_the_middle_of_a_stream_ends_it_after_its_answers(served: Served) -> None:
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        reflect: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        call = reflect(iter([ask.SerializeToString(), b"\xff", ask.SerializeToString()]))
        answer = reflection_pb2.ServerReflectionResponse.FromString(await read(call))
        assert answer.list_services_response.service
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await call.read()
        # Others on the same connection go on.
        stub = ServerReflectionStub(channel)
        assert len([reply async for reply in stub.ServerReflectionInfo(iter([ask, ask]))]) == 2
        checked = await HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
