"""How calls end over gRPC: what is counted, and what is logged when nobody is there to be told."""

import asyncio
import logging
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from engine.errors import InvalidRequest, OverCapacity
from rpc.errors import abort, reported, within_deadline
from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.conftest import Served, code_of


class GoneContext:
    """The context of a call whose deadline has passed: every batch fails."""

    aborts = 0

    def time_remaining(self) -> float:
        return 0.0

    async def abort(self, *status: Any) -> None:
        self.aborts += 1
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")

    async def write(self, message: Any) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")


async def test_an_abort_that_reaches_nobody_ends_the_call_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    context: Any = GoneContext()
    with pytest.raises(asyncio.CancelledError):
        async with reported(context), within_deadline(context):
            pass
    with pytest.raises(asyncio.CancelledError):
        await abort(context, InvalidRequest("x", "y"))
    assert context.aborts == 2  # once each
    with pytest.raises(asyncio.CancelledError):
        async with reported(context):
            await context.write(pb.GenerateResponse())
    assert context.aborts == 2 and not caplog.records


async def test_short_deadlines_leave_nothing_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        method: Any = channel.unary_stream(
            "/engine.v1.Engine/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        calls = [method(pb.GenerateRequest(text="x"), timeout=(i % 20) / 1000) for i in range(200)]
        codes = await asyncio.gather(*(code_of(call.read()) for call in calls))
    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert [record.getMessage() for record in caplog.records] == []


async def test_refused_calls_are_counted(served: Served) -> None:
    for refusal in (InvalidRequest("prompt", "x"), OverCapacity("full"), None):
        served.engine.refusal = refusal
        call = served.client.generate(pb.GenerateRequest(text="x"))
        if refusal is None:
            (await served.engine.submissions.get()).finish("y", [1])
            async for _ in call:
                pass
        else:
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
    text = generate_latest(served.engine.metrics).decode()
    counted = 'grpc_server_handled_total{grpc_code="%s",grpc_method="Generate",grpc_service="engine.v1.Engine"} 1.0'
    for code in ("InvalidArgument", "ResourceExhausted", "OK"):
        assert counted % code in text
