"""GetStats, StreamStats and the profile over gRPC; the hint when to try again."""

import json
from dataclasses import fields

import grpc
import pytest

from engine.errors import OverCapacity
from engine.observe.snapshot import EngineStats, TenantStats
from rpc.client import retry_delay
from rpc.pace import Pace
from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.conftest import Served, Serving, read
from tests.rpc.fake_engine import STATS, FakeEngine, profile
from tests.rpc.manual_clock import ManualClock

HELLO = pb.GenerateRequest(text="hi")


def plain(stats: pb.Stats) -> EngineStats:
    """The message as the engine's own value; fails on a field that only one of them has."""
    values = {f.name: getattr(stats, f.name) for f in pb.Stats.DESCRIPTOR.fields}
    values["tenants"] = tuple(
        TenantStats(**{f.name: getattr(t, f.name) for f in pb.TenantStats.DESCRIPTOR.fields}) for t in stats.tenants
    )
    return EngineStats(**values)


async def test_get_stats_has_every_number(served: Served) -> None:
    assert {f.name for f in fields(EngineStats)} == {f.name for f in pb.Stats.DESCRIPTOR.fields}
    assert plain(await served.client.stats()) == STATS


async def test_stats_come_now_and_then_at_every_interval(serving: Serving) -> None:
    clock = ManualClock()
    async with serving(clock=clock) as served:
        call = served.client.stream_stats(2.5)
        assert plain(await read(call)) == STATS
        for _ in range(3):
            await clock.until_sleeping(2.5)
            clock.advance(2.5)
            assert plain(await read(call)) == STATS
        call.cancel()


@pytest.mark.parametrize("interval", [0.0, 0.09, -1.0, float("nan"), float("inf")])
async def test_an_interval_that_would_flood_is_refused(served: Served, interval: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.stream_stats(interval).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("interval_seconds")


async def test_nothing_to_show_before_the_engine_is_ready(serving: Serving) -> None:
    engine = FakeEngine()
    engine.may_load.clear()
    async with serving(engine, wait=False) as served:
        for call in (served.client.stats(), served.client.start_profile(), served.client.stop_profile()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_profile_is_a_chrome_trace(served: Served) -> None:
    await served.client.start_profile()
    assert served.engine.profile is not None
    served.engine.profile = profile(4, "r1")
    events = json.loads(await served.client.stop_profile())["traceEvents"]
    assert sum(e["name"] == "schedule" for e in events) == 4
    assert served.engine.profile is None


async def test_a_long_profile_comes_in_pieces_and_can_be_cut(served: Served) -> None:
    served.engine.profile = profile(3000)
    whole = await served.client.stop_profile()
    assert len(whole) > 2 << 20  # more than a message
    assert sum(e["name"] == "schedule" for e in json.loads(whole)["traceEvents"]) == 3000
    served.engine.profile = profile(3000)
    cut = json.loads(await served.client.stop_profile(max_iterations=5))
    assert sum(e["name"] == "schedule" for e in cut["traceEvents"]) == 5


# -- when to try again ----------------------------------------------------------------------


def test_pace_is_the_queue_over_the_rate_of_the_last_minute() -> None:
    clock = ManualClock()
    pace = Pace(clock)
    assert pace.retry_after(10) == 1.0  # nothing is known
    for _ in range(4):
        pace.request_ended()
        clock.advance(0.5)
    assert pace.retry_after(10) == 5.0  # 2 a second
    assert pace.retry_after(1000) == 30.0
    assert pace.retry_after(0) == 0.1
    clock.advance(58.0)
    assert pace.retry_after(1) == 15.0  # 4 in a minute, although the minute has been silent
    clock.advance(3.0)
    assert pace.retry_after(1) == 1.0


async def test_a_refusal_says_when_to_try_again(serving: Serving) -> None:
    clock = ManualClock()
    async with serving(clock=clock) as served:
        for _ in range(2):  # 2 requests in 0.5 s
            call = served.client.generate(HELLO)
            (await served.engine.submissions.get()).finish()
            assert len([r async for r in call]) == 1
            clock.advance(0.25)
        served.engine.refusal = OverCapacity("8 requests of tenant 'acme' are waiting", num_queued=8)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.client.generate(HELLO).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_delay(caught.value) == 2.0


async def test_other_errors_say_nothing_of_a_retry(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.generate(pb.GenerateRequest()).read()
    assert retry_delay(caught.value) is None
