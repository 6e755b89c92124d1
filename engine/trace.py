"""Trace: what every iteration of the loop did, in a bounded ring; and the same as a Chrome trace.

An iteration is one turn of the loop that launched or settled a step. Its phases follow one another
without a gap, in this order, so that the iterations and the idle time between them add up to wall time:

    |idle| intake | schedule | launch | sample | tasks | device | settle | publish |idle| intake | ...

    tasks    other tasks of the event loop got a turn, because the step had already run
    device   waiting for the step before; other tasks run meanwhile

`device_seconds` is what the device says it spent on the step that settled; it overlaps the host's
phases. A profile is a second, longer ring that is filled while somebody asks for it.
Read next: `engine/observer.py` (who writes it), `engine/profile/report.py` (who reads it).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.request import FinishReason

PHASES = ("intake", "schedule", "launch", "sample", "tasks", "device", "settle", "publish")
INTAKE, SCHEDULE, LAUNCH, SAMPLE, TASKS, DEVICE, SETTLE, PUBLISH = range(len(PHASES))

RING_SIZE = 4096
"""Iterations and requests kept at all times; an iteration takes 0.6 KB."""
PROFILE_SIZE = 1 << 16
"""Iterations and requests that a profile keeps, the latest."""


class IterationRecord(NamedTuple):
    """One iteration. Times are seconds of the loop's clock.

    Attributes:
        start: when its first phase began.
        idle: time without work between the iteration before and `start`.
        phases: seconds in each of `PHASES`.
        launched: number of the step launched, 0 if none was.
        settled: number of the step settled, 0 if none was.
        tokens: tokens the launched step computes.
        prefill_rows: its rows that compute prompt tokens, or tokens again after preemption.
        decode_rows: its rows that compute the one token sampled last.
        sampled: tokens gained from the settled step.
        running: sequences with a row, at the end of the iteration.
        waiting: sequences without one.
        kv_usage: share of the KV blocks in use.
        kv_fill: share of the slots in those blocks that hold tokens; 1 when none is in use.
        preemptions: sequences preempted in this iteration.
        device_seconds: what the device spent on the settled step.
    """

    start: float
    idle: float
    phases: tuple[float, ...]
    launched: int
    settled: int
    tokens: int
    prefill_rows: int
    decode_rows: int
    sampled: int
    running: int
    waiting: int
    kv_usage: float
    kv_fill: float
    preemptions: int
    device_seconds: float

    @property
    def seconds(self) -> float:
        """From its start to its end."""
        return sum(self.phases)


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request that is alive; None until they do.

    Attributes:
        arrival: when it passed the door.
        scheduled: when its first step was launched; preemption does not change it.
        first_token: when its first token settled, of any choice.
        last_tokens: when the last token of each choice settled.
        num_tokens: tokens sampled for each choice.
        preempted: when it lost its row; kept only if requests are traced.
    """

    num_choices: int
    arrival: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    last_tokens: list[float | None] = field(init=False)
    num_tokens: list[int] = field(init=False)
    preempted: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last_tokens = [None] * self.num_choices
        self.num_tokens = [0] * self.num_choices


class RequestRecord(NamedTuple):
    """A request that has ended. Times are of the loop's clock, None where it did not get that far.

    Attributes:
        arrival, scheduled, first_token: as in RequestTimes.
        last_token: when its last token settled, of any choice.
        ended: when it left the engine.
        prompt_tokens: length of the prompt.
        cached_tokens: the part of it that the prefix cache served.
        output_tokens: tokens sampled, over all choices.
        longest_choice: tokens sampled for the choice with the most.
        finish_reason: of the choice that ended last; "error" if the request failed.
    """

    request_id: str
    arrival: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    ended: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    longest_choice: int
    finish_reason: FinishReason

    @property
    def time_per_output_token(self) -> float | None:
        """Mean gap between the tokens of a choice; None if it has fewer than two."""
        if self.first_token is None or self.last_token is None or self.longest_choice < 2:
            return None
        return (self.last_token - self.first_token) / (self.longest_choice - 1)


class Profile(NamedTuple):
    """What happened between `started` and `stopped`; requests are those that ended in between."""

    started: float
    stopped: float
    iterations: list[IterationRecord]
    requests: list[RequestRecord]


class Trace:
    """The rings: the last iterations and requests, and the profile if one is being taken."""

    def __init__(self, ring_size: int = RING_SIZE, profile_size: int = PROFILE_SIZE) -> None:
        self.iterations: deque[IterationRecord] = deque(maxlen=ring_size)
        self.requests: deque[RequestRecord] = deque(maxlen=ring_size)
        self._profile_size = profile_size
        self._profiled: tuple[deque[IterationRecord], deque[RequestRecord]] | None = None
        self._started = 0.0

    @property
    def is_profiling(self) -> bool:
        """Whether a profile is being taken."""
        return self._profiled is not None

    def add_iteration(self, record: IterationRecord) -> None:
        """Keep an iteration."""
        self.iterations.append(record)
        if self._profiled is not None:
            self._profiled[0].append(record)

    def add_request(self, record: RequestRecord) -> None:
        """Keep a request."""
        self.requests.append(record)
        if self._profiled is not None:
            self._profiled[1].append(record)

    def start_profile(self, now: float) -> None:
        """Take a profile from now on; one that is being taken starts again."""
        self._started = now
        self._profiled = deque(maxlen=self._profile_size), deque(maxlen=self._profile_size)

    def stop_profile(self, now: float) -> Profile:
        """End the profile and return it; an empty one if none was being taken."""
        iterations, requests = self._profiled or ((), ())
        started = now if self._profiled is None else self._started
        self._profiled = None
        return Profile(started, now, list(iterations), list(requests))


# -- Chrome trace ---------------------------------------------------------------------------

_HOST, _DEVICE, _REQUESTS = 1, 2, 3
_LANES = {_HOST: "host", _DEVICE: "device", _REQUESTS: "requests"}
_COUNTERS = ("running", "waiting", "tokens", "kv_usage", "kv_fill")


def chrome_trace(iterations: Iterable[IterationRecord], requests: Iterable[RequestRecord] = ()) -> dict[str, Any]:
    """The records as Trace Event JSON, which Perfetto and chrome://tracing show; times in microseconds.

    Three lanes: the host's phases, the device's steps, and the requests as spans from arrival to end. A
    step's span ends when the host saw it end and is cut where it would begin before the one before it
    ended; `args.device_seconds` is what the device measured. Format: "Trace Event Format", Google, 2016.
    """
    iterations, requests = list(iterations), list(requests)
    origin = min([i.start for i in iterations] + [r.arrival for r in requests], default=0.0)
    events = [
        {"ph": "M", "name": "process_name", "pid": lane, "tid": lane, "args": {"name": name}}
        for lane, name in _LANES.items()
    ]
    device_free = origin
    for record in iterations:
        events += _phase_events(record, origin)
        seen = record.start + sum(record.phases[: DEVICE + 1])
        if record.settled:
            start = max(device_free, seen - record.device_seconds)
            args = {"step": record.settled, "device_seconds": record.device_seconds}
            events.append(_complete(_DEVICE, f"step {record.settled}", start - origin, seen - start, args))
            device_free = seen
        counts = record._asdict()
        events += [
            {"ph": "C", "name": name, "pid": _HOST, "tid": _HOST, "ts": _us(record.start - origin),
             "args": {name: counts[name]}}
            for name in _COUNTERS
        ]  # fmt: skip
    events += [event for n, request in enumerate(requests) for event in _request_events(n, request, origin)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _phase_events(record: IterationRecord, origin: float) -> Iterator[dict[str, Any]]:
    at = record.start - origin
    for name, seconds in zip(PHASES, record.phases, strict=True):
        if seconds:
            yield _complete(_HOST, name, at, seconds, {"launched": record.launched, "settled": record.settled})
        at += seconds


def _request_events(number: int, request: RequestRecord, origin: float) -> Iterator[dict[str, Any]]:
    """A span with its parts inside. Async events: requests overlap, and each needs a row of its own."""
    parts = [
        ("queue", request.arrival, request.scheduled),
        ("prefill", request.scheduled, request.first_token),
        ("decode", request.first_token, request.last_token),
    ]
    args = {
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": request.output_tokens,
        "finish_reason": request.finish_reason,
    }
    base = {"cat": "request", "id": number, "pid": _REQUESTS, "tid": _REQUESTS}
    yield {**base, "ph": "b", "name": request.request_id, "ts": _us(request.arrival - origin), "args": args}
    for name, start, end in parts:
        if start is not None and end is not None:
            yield {**base, "ph": "b", "name": name, "ts": _us(start - origin)}
            yield {**base, "ph": "e", "name": name, "ts": _us(end - origin)}
    yield {**base, "ph": "e", "name": request.request_id, "ts": _us(request.ended - origin)}


def _complete(lane: int, name: str, start: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": lane, "tid": lane, "ts": _us(start), "dur": _us(seconds), "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
