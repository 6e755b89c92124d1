"""Health while the engine hangs, in virtual time."""

import grpc
from grpc_health.v1 import health_pb2

from tests.rpc.conftest import HealthStub, Served, Serving
from tests.rpc.manual_clock import ManualClock

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_after(served: Served, clock: ManualClock, seconds: float) -> int:
    """Let time pass in the watchdog's own steps, then ask."""
    for _ in range(round(seconds / 2)):
        await clock.until_sleeping(2.0)
        clock.advance(2.0)
    await clock.until_sleeping(2.0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        return (await HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status


async def test_an_engine_that_hangs_is_not_serving_until_it_moves(serving: Serving) -> None:
    clock = ManualClock()
    async with serving(clock=clock, watchdog_seconds=8.0) as served:
        served.engine.has_work = True
        served.engine.num_iterations += 1
        assert await health_after(served, clock, 6) == SERVING
        assert await health_after(served, clock, 4) == NOT_SERVING
        assert await health_after(served, clock, 20) == NOT_SERVING
        served.engine.num_iterations += 1
        assert await health_after(served, clock, 2) == SERVING


async def test_an_idle_engine_and_a_slow_one_are_serving(serving: Serving) -> None:
    clock = ManualClock()
    async with serving(clock=clock, watchdog_seconds=8.0) as served:
        assert await health_after(served, clock, 100) == SERVING  # idle
        served.engine.has_work = True
        for _ in range(5):
            served.engine.num_iterations += 1
            assert await health_after(served, clock, 6) == SERVING


async def test_a_watchdog_says_nothing_while_draining(serving: Serving) -> None:
    clock = ManualClock()
    async with serving(clock=clock, watchdog_seconds=8.0) as served:
        served.engine.has_work = True
        assert await health_after(served, clock, 10) == NOT_SERVING
        served.server.stop()
        await served.run
        assert clock.sleepers == 0
