"""Report: a profile in numbers.

Wall time is from the profile's start to the end of its last iteration, and splits without rest into

    idle           no request had work
    host           the host's phases: intake, schedule, launch, sample, tasks, settle, publish
    device wait    the host had nothing to do but wait for the step before

`residual` is what is missing from that sum. Device busy time is measured by the device and overlaps the
others, because a step is launched before the one before it has settled. An iteration's time beyond its
step's device time is idle time of the device: up to its device wait it is *hand-over* (the result was
there, or the step had not begun, and the host did not know), and the rest is *host exposed*.
Read next: `engine/cli/profile/advice.py`, `engine/observe/records.py`.
"""

import csv
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any, NamedTuple

import numpy as np

from engine.config import EngineConfig
from engine.observe.records import DEVICE, PHASES, SETTLE, IterationRecord, Profile

HOST_PHASES = tuple(name for name in PHASES if name != "device")


class Distribution(NamedTuple):
    """Percentiles, interpolated linearly between the two nearest values; all 0 when there are none."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float
    total: float


def distribution(values: Iterable[float | None]) -> Distribution:
    """Of the values that are there."""
    data = np.array([v for v in values if v is not None], np.float64)
    if not data.size:
        return Distribution(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(data, (50, 90, 99)).tolist()
    return Distribution(p50, p90, p99, float(data.max()), float(data.mean()), float(data.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times in seconds. Distributions are over iterations, of requests over requests.

    Attributes:
        phases: of every name in `PHASES`.
        iteration: all phases of an iteration together.
        device_prefill: device seconds of steps with prefill rows.
        decode_iteration: the same, for iterations that settle a step without prefill.
        device: device seconds of a step.
        tokens, prefill_rows, decode_rows: of steps launched.
        prefill_steps: steps settled from when a request is first scheduled to its first token; a prompt
            computed at once takes two, because one is in flight.
        kv_usage: share of blocks in use; kv_fill: share of slots in them that hold tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    wall: float
    idle: float
    host: float
    device_wait: float
    residual: float
    device_busy: float
    device_prefill: float
    host_exposed: float
    hand_over: float
    phases: dict[str, Distribution]
    iteration: Distribution
    decode_iteration: Distribution
    device: Distribution
    tokens: Distribution
    prefill_rows: Distribution
    decode_rows: Distribution
    running: Distribution
    waiting: Distribution
    kv_usage: Distribution
    kv_fill: Distribution
    preemptions: int
    num_iterations: int
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_time: Distribution
    prefill_time: Distribution
    prefill_steps: Distribution
    time_to_first_token: Distribution
    time_per_output_token: Distribution
    e2e_latency: Distribution

    @property
    def active(self) -> float:
        """Wall time that was not idle."""
        return self.wall - self.idle

    def share(self, seconds: float) -> float:
        """Part of the active time."""
        return seconds / self.active if self.active > 0 else 0.0

    @property
    def slowest_host_phase(self) -> str:
        """The host's phase that took most in total."""
        return max(HOST_PHASES, key=lambda name: self.phases[name].total)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        return {k: v._asdict() if isinstance(v, Distribution) else v for k, v in values.items()} | {
            "phases": {name: d._asdict() for name, d in self.phases.items()}
        }


def make_report(profile: Profile, config: EngineConfig) -> Report:
    """The numbers of a profile taken under `config`."""
    iterations, requests = profile.iterations, profile.requests
    times = _wall_times(profile)
    launched = [i for i in iterations if i.launched]
    settled = [i for i in iterations if i.settled]
    prefill_steps = {i.launched for i in launched if i.prefill_rows}
    return Report(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget,
        **times,
        device_prefill=sum(i.device_seconds for i in settled if i.settled in prefill_steps),
        phases={name: distribution(i.phases[p] for i in iterations) for p, name in enumerate(PHASES)},
        iteration=distribution(i.seconds for i in iterations),
        decode_iteration=distribution(i.seconds for i in settled if i.settled not in prefill_steps),
        device=distribution(i.device_seconds for i in settled),
        tokens=distribution(i.tokens for i in launched),
        prefill_rows=distribution(i.prefill_rows for i in launched),
        decode_rows=distribution(i.decode_rows for i in launched),
        running=distribution(i.running for i in iterations),
        waiting=distribution(i.waiting for i in iterations),
        kv_usage=distribution(i.kv_usage for i in iterations),
        kv_fill=distribution(i.kv_fill for i in iterations if i.kv_usage),
        preemptions=sum(i.preemptions for i in iterations),
        num_iterations=len(iterations),
        num_requests=len(requests),
        prompt_tokens=sum(r.prompt_tokens for r in requests),
        cached_tokens=sum(r.cached_tokens for r in requests),
        output_tokens=sum(r.output_tokens for r in requests),
        queue_time=distribution(_gap(r.arrival, r.scheduled) for r in requests),
        prefill_time=distribution(_gap(r.scheduled, r.first_token) for r in requests),
        prefill_steps=distribution(_prefill_steps(profile)),
        time_to_first_token=distribution(_gap(r.arrival, r.first_token) for r in requests),
        time_per_output_token=distribution(r.time_per_output_token for r in requests),
        e2e_latency=distribution(r.ended - r.arrival for r in requests),
    )


def _wall_times(profile: Profile) -> dict[str, float]:
    iterations = profile.iterations
    if not iterations:
        names = ("wall", "idle", "host", "device_wait", "residual", "device_busy", "host_exposed", "hand_over")
        return dict.fromkeys(names, 0.0)
    first, last = iterations[0], iterations[-1]
    # The first iteration's idle time may have begun before the profile did, and the iteration itself too.
    idle_before = min(first.idle, max(0.0, first.start - profile.started))
    wall = last.start + last.seconds - (first.start - idle_before)
    idle = idle_before + sum(i.idle for i in iterations[1:])
    wait = sum(i.phases[DEVICE] for i in iterations)
    host = sum(i.seconds for i in iterations) - wait
    hand_over = [max(0.0, i.phases[DEVICE] - i.device_seconds) for i in iterations]
    exposed = [max(0.0, i.seconds - i.device_seconds - h) for i, h in zip(iterations, hand_over, strict=True)]
    return {
        "wall": wall,
        "idle": idle,
        "host": host,
        "device_wait": wait,
        "residual": wall - idle - host - wait,
        "device_busy": sum(i.device_seconds for i in iterations),
        "host_exposed": sum(exposed),
        "hand_over": sum(hand_over),
    }


def _prefill_steps(profile: Profile) -> Iterator[float]:
    settle_times = [i.start + sum(i.phases[: SETTLE + 1]) for i in profile.iterations if i.settled]
    for request in profile.requests:
        if request.scheduled is not None and request.first_token is not None:
            # The first token has the time of its step's settling, but for rounding.
            until = bisect_right(settle_times, request.first_token + 1e-7)
            yield until - bisect_right(settle_times, request.scheduled)


def _gap(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def write_csv(iterations: Iterable[IterationRecord], file: IO[str]) -> None:
    """One line per iteration, with a column for each phase."""
    names = [name for name in IterationRecord._fields if name != "phases"]
    writer = csv.writer(file)
    writer.writerow([*names, *PHASES])
    for i in iterations:
        writer.writerow([*(getattr(i, name) for name in names), *i.phases])
