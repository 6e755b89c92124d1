"""Records of iterations and requests, the rings, and the Chrome trace made of them."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from engine.errors import StepFault
from engine.observe.chrome_trace import chrome_trace
from engine.observe.records import DEVICE, LAUNCH, PHASES, SAMPLE, IterationRecord, Records, RequestRecord
from tests.engine.timed import FORWARD, STEP, TimedServer, timed_server
from tests.engine.timed import SAMPLE as SAMPLE_SECONDS


async def run(server: TimedServer, *requests: tuple[list[int], int]) -> list[IterationRecord]:
    streams = [server.generate(prompt, max_tokens) for prompt, max_tokens in requests]
    await server.settle()
    assert len(streams) == len(requests)
    return list(server.observer.records.iterations)


def spent(record: IterationRecord) -> dict[int, float]:
    return {phase: seconds for phase, seconds in enumerate(record.phases) if seconds}


async def test_every_iteration_leaves_a_record() -> None:
    """10 tokens under a budget of 8, beside a short one: two chunks, then decoding."""
    async with timed_server(budget=8) as server:
        records = await run(server, ([1] * 10, 3), ([2, 3], 1))
    assert [(r.launched, r.settled) for r in records] == [(1, 0), (2, 1), (3, 2), (4, 3), (0, 4)]
    assert [r.tokens for r in records] == [8, 2 + 2, 1, 1, 0]
    assert [(r.prefill_rows, r.decode_rows) for r in records] == [(1, 0), (2, 0), (0, 1), (0, 1), (0, 0)]
    assert [r.sampled for r in records] == [0, 0, 2, 1, 1]
    assert [r.running for r in records] == [1, 2, 1, 1, 0]
    assert [r.waiting for r in records] == [1, 0, 0, 0, 0]
    launch = {LAUNCH: FORWARD, SAMPLE: SAMPLE_SECONDS}
    assert [spent(r) for r in records] == [launch, *[{**launch, DEVICE: STEP}] * 3, {DEVICE: STEP}]
    assert [r.device_seconds for r in records] == [0.0, STEP, STEP, STEP, STEP]


async def test_phases_and_idle_time_add_up_to_wall_time() -> None:
    async with timed_server(budget=8) as server:
        began = server.clock.now
        await run(server, ([1] * 10, 3))
        server.clock.now += 100.0
        records = await run(server, ([4], 2))
        ended = server.clock.now
    assert sum(r.idle for r in records) == 100.0
    assert sum(r.idle + r.seconds for r in records) == ended - began
    for before, after in pairwise(records):
        assert after.start == before.start + before.seconds + after.idle


async def test_kv_use_and_fill() -> None:
    """9 tokens take 3 of 8 blocks of 4; the third holds 1, then 2."""
    async with timed_server(num_blocks=8) as server:
        first, second, last = await run(server, ([1] * 9, 2))
    assert (first.kv_usage, first.kv_fill) == (3 / 8, 9 / 12)
    assert (second.kv_usage, second.kv_fill) == (3 / 8, 10 / 12)
    assert (last.kv_usage, last.kv_fill) == (0.0, 1.0)


async def test_preemptions_are_counted_where_they_happen() -> None:
    async with timed_server(num_blocks=10) as server:
        records = await run(server, ([1] * 8, 16), ([2] * 8, 16))
        assert sum(r.preemptions for r in records) == server.roster.num_preemptions > 0
        (when,) = (i for i, r in enumerate(records) if r.preemptions)
        assert (records[when - 1].running, records[when].running, records[when].waiting) == (2, 1, 1)


async def test_a_failed_step_leaves_a_record_without_tokens() -> None:
    async with timed_server() as server:
        server.device.faults[1] = StepFault("bad")
        first, second, third = await run(server, ([1], 9))
        assert first.settled == second.settled == 0
        assert second.phases[DEVICE] == STEP
        assert third.sampled == 0


async def test_request_records() -> None:
    async with timed_server() as server:
        await run(server, ([1] * 17, 2))
        await run(server, ([1] * 17, 1))
        first, second = server.observer.records.requests
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens, first.finish_reason) == (17, 0, 2, "length")
    assert second.cached_tokens == 16
    launch = FORWARD + SAMPLE_SECONDS
    assert (first.arrival, first.scheduled) == (1000.0, 1000.0)
    assert first.first_token == 1000.0 + 2 * launch + STEP
    assert first.last_token == first.ended == first.first_token + STEP
    assert first.time_per_output_token == STEP
    assert second.time_per_output_token is None


async def test_a_request_that_never_ran_has_an_arrival_and_an_end() -> None:
    async with timed_server(max_num_seqs=1) as server:
        running = server.generate([1], 2)
        await server.until(lambda: len(server.device.plans) == 2)
        server.generate([2], 2).cancel()
        await server.settle()
        record, _ = sorted(server.observer.records.requests, key=lambda r: r.output_tokens)
        assert (record.scheduled, record.first_token, record.last_token) == (None, None, None)
        assert record.ended >= record.arrival and record.finish_reason == "abort"
        assert running.request_id


def iteration(n: int) -> IterationRecord:
    phases = (0.0,) * len(PHASES)
    return IterationRecord(float(n), 0.0, phases, n, 0, 0, 0, 0, 0, 0, 0, 0.0, 1.0, 0, 0.0)


def test_rings_are_bounded_and_a_profile_holds_what_came_after_its_start() -> None:
    trace = Records(ring_size=3, profile_size=4)
    for n in range(5):
        trace.add_iteration(iteration(n))
    assert [r.launched for r in trace.iterations] == [2, 3, 4]
    trace.start_profile(10.0)
    assert trace.is_profiling
    for n in range(5, 7):
        trace.add_iteration(iteration(n))
    profile = trace.stop_profile(12.0)
    assert (profile.started, profile.stopped) == (10.0, 12.0)
    assert [r.launched for r in profile.iterations] == [5, 6]
    assert not trace.is_profiling
    assert trace.stop_profile(13.0) == (13.0, 13.0, [], [])
    trace.start_profile(14.0)
    for n in range(7, 20):
        trace.add_iteration(iteration(n))
    assert [r.launched for r in trace.stop_profile(15.0).iterations] == [16, 17, 18, 19]


# -- Chrome trace ---------------------------------------------------------------------------


@pytest.fixture
async def server() -> Any:
    async with timed_server(num_blocks=10, budget=8) as server:
        await run(server, ([1] * 8, 16), ([2] * 10, 16), ([3], 1))
        server.clock.now += 50.0
        await run(server, ([4], 2))
        yield server


def events_of(server: TimedServer) -> list[dict[str, Any]]:
    trace = server.observer.records
    text = json.dumps(chrome_trace(trace.iterations, trace.requests))
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


async def test_trace_events_are_well_formed(server: TimedServer) -> None:
    events = events_of(server)
    assert {e["ph"] for e in events} == {"M", "X", "C", "b", "e"}
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] not in "be" or {"id", "cat"} <= event.keys()


async def test_trace_lanes_are_monotonic_and_do_not_overlap(server: TimedServer) -> None:
    ends: dict[int, float] = defaultdict(float)
    for event in events_of(server):
        if event["ph"] == "X":
            assert event["ts"] >= ends[event["tid"]] - 1e-3
            ends[event["tid"]] = event["ts"] + event["dur"]
    assert len(ends) == 2
    stamps = [e["ts"] for e in events_of(server) if e["ph"] == "C" and e["name"] == "running"]
    assert stamps == sorted(stamps) and len(stamps) == len(server.observer.records.iterations)


async def test_every_begin_has_its_end_inside_the_span_around_it(server: TimedServer) -> None:
    open_spans: dict[int, list[tuple[str, float]]] = defaultdict(list)
    last: dict[int, float] = defaultdict(float)
    for event in events_of(server):
        if event["ph"] not in "be":
            continue
        spans = open_spans[event["id"]]
        assert event["ts"] >= last[event["id"]]
        last[event["id"]] = event["ts"]
        if event["ph"] == "b":
            spans.append((event["name"], event["ts"]))
        else:
            assert spans.pop()[0] == event["name"]
    assert len(open_spans) == 4 and not any(open_spans.values())


async def test_trace_shows_phases_and_device_steps_in_microseconds(server: TimedServer) -> None:
    events = [e for e in events_of(server) if e["ph"] == "X"]
    launches = [e["dur"] for e in events if e["name"] == "launch"]
    assert launches == [FORWARD * 1e6] * len(server.device.plans)
    steps = [e for e in events if e["name"].startswith("step ")]
    assert [e["args"]["step"] for e in steps] == list(range(1, len(server.device.plans) + 1))
    assert {e["dur"] for e in steps} == {STEP * 1e6}


def test_a_step_seen_late_is_cut_where_the_one_before_it_ended() -> None:
    """Both steps took 5 s on the device; the host looked at 10 and 12."""
    phases = [[0.0] * len(PHASES) for _ in range(2)]
    phases[0][DEVICE], phases[1][DEVICE] = 10.0, 2.0
    records = [
        iteration(0)._replace(phases=tuple(phases[0]), settled=1, device_seconds=5.0),
        iteration(10)._replace(phases=tuple(phases[1]), settled=2, device_seconds=5.0),
    ]
    steps = [e for e in chrome_trace(records)["traceEvents"] if e["name"].startswith("step ")]
    assert [(e["ts"], e["dur"]) for e in steps] == [(5e6, 5e6), (10e6, 2e6)]
    assert [e["args"]["device_seconds"] for e in steps] == [5.0, 5.0]


def test_a_trace_of_nothing_is_valid() -> None:
    assert [e["ph"] for e in chrome_trace([])["traceEvents"]] == ["M", "M", "M"]


def test_a_request_that_never_ran_has_one_span() -> None:
    record = RequestRecord("r", 1.0, None, None, None, 3.0, 5, 0, 0, 0, "abort")
    spans = [e for e in chrome_trace([], [record])["traceEvents"] if e["ph"] in "be"]
    assert [(e["ph"], e["name"], e["ts"]) for e in spans] == [("b", "r", 0.0), ("e", "r", 2e6)]
