"""The numbers of a profile: of the real loop in a fake time, and of records written by hand."""

import csv
import io
import json

import numpy as np
import pytest

from engine.cli.profile.report import distribution, make_report, write_csv
from engine.config import EngineConfig
from engine.observe.records import DEVICE, PHASES, IterationRecord, Profile, RequestRecord
from tests.engine.timed import FORWARD, SAMPLE, STEP, timed_server

CONFIG = EngineConfig(model="m", max_num_batched_tokens=512)


def iteration(
    start: float, *, host: float, wait: float, device: float, idle: float = 0.0, n: int = 1
) -> IterationRecord:
    """One that launches step n and settles step n - 1; its host time is all "schedule"."""
    phases = [0.0] * len(PHASES)
    phases[1], phases[DEVICE] = host, wait
    return IterationRecord(start, idle, tuple(phases), n, n - 1, 4, 1, 3, 3, 4, 2, 0.5, 0.75, 1, device)


async def test_host_and_device_wait_add_up_to_wall_time_within_2_percent() -> None:
    async with timed_server(num_blocks=10, budget=8) as server:
        await server.settle()
        server.clock.now += 50.0
        server.observer.start_profile()
        began = server.clock.now
        server.clock.now += 3.0
        streams = [server.generate([i] * 8, 16) for i in range(3)]
        await server.settle()
        server.clock.now += 40.0
        streams.append(server.generate([9], 2))
        await server.settle()
        wall = server.clock.now - began
        profile = server.observer.stop_profile()
    report = make_report(profile, CONFIG)
    assert report.wall == wall
    assert report.idle == 43.0
    assert abs(report.host + report.device_wait - (wall - report.idle)) <= 0.02 * wall
    assert report.residual == 0.0
    steps = len(server.device.plans)
    assert report.host == steps * (FORWARD + SAMPLE)
    assert report.device_wait == report.device_busy == steps * STEP
    assert report.num_requests == len(streams) and report.output_tokens == 3 * 16 + 2
    assert report.preemptions == server.roster.num_preemptions > 0


async def test_a_profile_that_starts_in_mid_flight() -> None:
    async with timed_server() as server:
        stream = server.generate([1], 9)
        await server.until(lambda: len(server.device.plans) == 2)
        server.observer.start_profile()
        server.clock.now += 5.0
        await server.settle()
        report = make_report(server.observer.stop_profile(), CONFIG)
    assert report.idle == report.residual == 0.0
    assert report.wall == report.host + report.device_wait
    assert stream.request_id


def test_what_the_device_waits_for() -> None:
    """Steps of 5 s. First hidden, then 2 s of host exposed, then 3 s until a result is noticed."""
    records = [
        iteration(0.0, host=1.0, wait=4.0, device=5.0, n=2),
        iteration(5.0, host=7.0, wait=0.0, device=5.0, n=3),
        iteration(12.0, host=1.0, wait=8.0, device=5.0, n=4),
    ]
    report = make_report(Profile(0.0, 21.0, records, []), CONFIG)
    assert (report.wall, report.host, report.device_wait, report.device_busy) == (21.0, 9.0, 12.0, 15.0)
    assert report.host_exposed == 2.0 + 1.0
    assert report.hand_over == 3.0
    assert report.slowest_host_phase == "schedule"


def test_decode_only_steps_are_told_from_those_with_prompts() -> None:
    """Steps 1 and 3 compute prompts; they settle in the iterations of 10 s and 30 s."""
    prompts = {1, 3}
    records = [
        iteration(0.0, host=0.0, wait=10.0 * n, device=float(n), n=n + 1)._replace(
            prefill_rows=int(n + 1 in prompts), decode_rows=1
        )
        for n in range(5)
    ]
    report = make_report(Profile(0.0, 1.0, records, []), CONFIG)
    assert (report.decode_iteration.total, report.device_prefill) == (20.0 + 40.0, 1.0 + 3.0)


async def test_steps_of_a_prompt() -> None:
    """20 tokens under a budget of 8 take 3 steps; one that comes while a step runs sees that one settle, too."""
    async with timed_server(budget=8) as server:
        await server.settle()
        server.observer.start_profile()
        streams = [server.generate([1] * 20, 9)]
        await server.until(lambda: len(server.device.plans) == 4)
        streams.append(server.generate([2], 1))
        await server.settle()
        report = make_report(server.observer.stop_profile(), CONFIG)
    assert (report.prefill_steps.max, report.prefill_steps.total) == (3.0, 3.0 + 2.0)
    assert len(streams) == 2


def test_requests() -> None:
    requests = [
        RequestRecord("a", 0.0, 1.0, 3.0, 9.0, 10.0, 5, 4, 4, 4, "length"),
        RequestRecord("b", 0.0, None, None, None, 2.0, 7, 0, 0, 0, "abort"),
    ]
    report = make_report(Profile(0.0, 10.0, [], requests), CONFIG)
    assert (report.queue_time.max, report.prefill_time.max, report.time_to_first_token.max) == (1.0, 2.0, 3.0)
    assert (report.time_per_output_token.max, report.e2e_latency.mean) == (2.0, 6.0)
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (12, 4, 4)


def test_nothing_gives_zeros() -> None:
    report = make_report(Profile(1.0, 2.0, [], []), CONFIG)
    assert report.wall == report.idle == report.share(1.0) == report.iteration.max == 0.0


def test_percentiles() -> None:
    """Against the definition: the value at place q (n - 1) of the sorted ones, between two of them linearly."""
    values = list(np.random.default_rng(0).exponential(size=101))
    d = distribution(values)
    ordered = sorted(values)
    assert (d.p50, d.p90, d.p99, d.max) == pytest.approx((ordered[50], ordered[90], ordered[99], ordered[100]))
    assert distribution([1.0, 2.0]).p90 == pytest.approx(1.9)
    assert distribution([3.0, None]) == (3.0, 3.0, 3.0, 3.0, 3.0, 3.0)
    assert distribution([]) == (0.0,) * 6


def test_json_has_every_number() -> None:
    report = make_report(Profile(0.0, 5.0, [iteration(0.0, host=1.0, wait=4.0, device=5.0, n=2)], []), CONFIG)
    values = json.loads(json.dumps(report.as_dict()))
    assert values["phases"]["device"] == dict.fromkeys(("p50", "p90", "p99", "max", "mean", "total"), 4.0)
    assert values["tokens"]["max"] == 4.0
    assert (values["wall"], values["preemptions"], values["max_num_seqs"]) == (5.0, 1, 64)


def test_csv_has_a_line_per_iteration_and_a_column_per_phase() -> None:
    file = io.StringIO()
    write_csv([iteration(1.5, host=1.0, wait=4.0, device=5.0, n=2)], file)
    (row,) = csv.DictReader(io.StringIO(file.getvalue()))
    assert (row["start"], row["schedule"], row["device"], row["device_seconds"]) == ("1.5", "1.0", "4.0", "5.0")
    assert (row["launched"], row["kv_fill"]) == ("2", "0.75")
