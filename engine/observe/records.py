"""Records: what every iteration of the loop did and when each request got where, in bounded rings.

An iteration is one turn of the loop that launched or settled a step. Its phases follow one another
without a gap, in this order, so that the iterations and the idle time between them add up to wall time:

    |idle| intake | schedule | launch | sample | tasks | device | settle | publish |idle| intake | ...

    tasks    other tasks of the event loop got a turn, because the step had already run
    device   waiting for the step before; other tasks run meanwhile

`device_seconds` is what the device says it spent on the step that settled; it overlaps the host's
phases. A profile is a second, longer ring that is filled while somebody asks for it.
Read next: `engine/observe/observer.py` (who writes them), `engine/cli/profile/report.py` (who reads them).
"""

from collections import deque
from typing import NamedTuple

from engine.request.outputs import FinishReason

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


class RequestRecord(NamedTuple):
    """A request that has ended. Times are of the loop's clock, None where it did not get that far.

    Attributes:
        arrival, scheduled, first_token: as in `engine.serving.live_request.RequestTimes`.
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


class Records:
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
