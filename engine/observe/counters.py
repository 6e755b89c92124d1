"""Counters: the numbers behind the metrics, kept as plain integers and lists.

The loop adds to them; whoever scrapes turns them into text (`engine/observe/prometheus.py`), so that the hot
loop pays an addition (a histogram: 0.3 us, where prometheus_client's own takes 2 us and a lock) and
equal values of one step count as one observation. Nothing here grows: no label comes from a request.
"""

from bisect import bisect_left
from itertools import takewhile
from typing import get_args

from engine.observe.records import PHASES, IterationRecord, RequestRecord
from engine.request.outputs import FinishReason

LATENCY_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.25, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
"""Upper bounds in seconds. vLLM's begin at 1 ms and 10 ms, above what a small model takes.

The limits for an SLO that vLLM's overview dashboard offers, 25 ms to 10 s, are all among them.
"""

STEP_BOUNDS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds in seconds for a phase of an iteration."""

ITERATION_TOKEN_BOUNDS = tuple(float(2**i) for i in range(15))


def token_bounds(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    series = (float(m * 10**e) for e in range(12) for m in (1, 2, 5))
    return tuple(takewhile(lambda bound: bound <= limit, series))


class Histogram:
    """Counts by upper bound; `counts[i]` is of `bounds[i - 1] < value <= bounds[i]`, the last of the rest."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add `value`, seen so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Counters:
    """Everything that is counted rather than read off the scheduler."""

    def __init__(self, max_model_len: int = 1 << 20) -> None:
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.leaked_blocks = 0
        self.ended = dict.fromkeys(get_args(FinishReason), 0)
        self.iteration_tokens = Histogram(ITERATION_TOKEN_BOUNDS)
        self.host_step = [Histogram(STEP_BOUNDS) for _ in PHASES]
        self.time_to_first_token = Histogram(LATENCY_BOUNDS)
        self.inter_token_latency = Histogram(LATENCY_BOUNDS)
        self.time_per_output_token = Histogram(LATENCY_BOUNDS)
        self.e2e_latency = Histogram(LATENCY_BOUNDS)
        self.queue_time = Histogram(LATENCY_BOUNDS)
        self.prefill_time = Histogram(LATENCY_BOUNDS)
        self.decode_time = Histogram(LATENCY_BOUNDS)
        self.request_prompt_tokens = Histogram(token_bounds(max_model_len))
        self.request_generation_tokens = Histogram(token_bounds(max_model_len))
        self.longest_choice = Histogram(token_bounds(max_model_len))
        self.computed_prompt_tokens = Histogram(token_bounds(max_model_len))

    def add_iteration(self, record: IterationRecord) -> None:
        """Count an iteration."""
        self.generation_tokens += record.sampled
        if record.launched:
            self.iteration_tokens.observe(record.tokens)
        for histogram, seconds in zip(self.host_step, record.phases, strict=True):
            if seconds:
                histogram.observe(seconds)

    def add_request(self, record: RequestRecord) -> None:
        """Count a request that has ended. What it never reached is not observed."""
        self.ended[record.finish_reason] += 1
        self.e2e_latency.observe(record.ended - record.arrival)
        self.request_prompt_tokens.observe(record.prompt_tokens)
        self.request_generation_tokens.observe(record.output_tokens)
        self.longest_choice.observe(record.longest_choice)
        if record.scheduled is None:
            return
        self.queue_time.observe(record.scheduled - record.arrival)
        self.computed_prompt_tokens.observe(record.prompt_tokens - record.cached_tokens)
        if record.first_token is None or record.last_token is None:
            return
        self.prefill_time.observe(record.first_token - record.scheduled)
        self.decode_time.observe(record.last_token - record.first_token)
        if record.time_per_output_token is not None:
            self.time_per_output_token.observe(record.time_per_output_token)
