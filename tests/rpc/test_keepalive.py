"""Pings of a client, which keep its idle connection open and could flood the server."""

import grpc
import pytest

from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.conftest import Serving
from tests.rpc.manual_clock import ManualClock

EAGER = [
    ("grpc.keepalive_time_ms", 200),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


async def test_a_client_that_pings_more_often_than_allowed_is_sent_away(serving: Serving) -> None:
    clock = ManualClock()  # the stream stays silent
    async with (
        serving(clock=clock, min_ping_interval=60) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.port}", EAGER) as channel,
    ):
        method = "/engine.v1.Engine/StreamStats"
        call = channel.unary_stream(method, pb.StreamStatsRequest.SerializeToString, pb.Stats.FromString)
        stream = call(pb.StreamStatsRequest())
        await stream.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "pings" in (caught.value.details() or "")
