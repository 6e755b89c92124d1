"""Metrics: a load in numbers, as vLLM's `bench serve` defines and names them.

    TTFT   from sending a request to its first message with tokens
    ITL    between one message and the next; a message may hold several tokens
    TPOT   (end to end - TTFT) / (output tokens - 1), of requests with two tokens or more
    E2EL   from sending to the last message with tokens

Failed requests count in `failed` and nowhere else.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from engine.cli.bench.goodput import meets
from engine.cli.bench.load import Answer, Run

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}
"""Names in the results, and what they stand for."""

LATE = 0.01
"""Seconds: a client whose p99 lateness is above has measured itself, too."""


class Latency(NamedTuple):
    """Seconds. Percentiles are interpolated linearly; all 0 when there are no values."""

    mean: float
    median: float
    std: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Times in seconds, rates per second.

    Attributes:
        request_goodput: completed requests that met every objective, per second; None without objectives.
        max_concurrent_requests: most requests that were under way at one time.
        latencies: of every name in LATENCIES.
        values: the single values behind them.
        lateness: p99 of what the client was late by.
        errors: how many requests failed of what.
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    max_concurrent_requests: int
    latencies: dict[str, Latency]
    values: dict[str, list[float]]
    lateness: float
    errors: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """With vLLM's key names, latencies in milliseconds."""
        names = (
            "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
            "request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests",
        )  # fmt: skip
        return (
            {name: getattr(self, name) for name in names}
            | {
                f"{statistic}_{name}_ms": 1e3 * value
                for name, values in self.latencies.items()
                for statistic, value in values._asdict().items()
            }
            | {"client_lateness_p99_ms": 1e3 * self.lateness, "error_counts": self.errors}
        )


def latency(values: Iterable[float]) -> Latency:
    """Statistics of values in seconds."""
    data = np.array(list(values), np.float64)
    if not data.size:
        return Latency(0.0, 0.0, 0.0, 0.0, 0.0)
    median, p90, p99 = np.percentile(data, (50, 90, 99)).tolist()
    return Latency(float(data.mean()), median, float(data.std()), p90, p99)


def make_metrics(run: Run, objectives: Mapping[str, float]) -> Metrics:
    """The numbers of a load, and its goodput under `objectives`, seconds by name."""
    good = [a for a in run.answers if not a.error]
    duration = run.ended - run.started
    tokens_in, tokens_out = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    singles = [request_latencies(a) for a in good]
    values = {
        "ttft": [s["ttft"] for s in singles],
        "tpot": [s["tpot"] for s, a in zip(singles, good, strict=True) if a.output_tokens > 1],
        "itl": [after - before for a in good for before, after in pairwise(a.times)],
        "e2el": [s["e2el"] for s in singles],
    }

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    return Metrics(
        duration=duration,
        completed=len(good),
        failed=len(run.answers) - len(good),
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        request_throughput=rate(len(good)),
        output_throughput=rate(tokens_out),
        total_token_throughput=rate(tokens_in + tokens_out),
        request_goodput=rate(sum(meets(objectives, s) for s in singles)) if objectives else None,
        max_concurrent_requests=max(in_flight(run.answers)[1], default=0),
        latencies={name: latency(v) for name, v in values.items()},
        values=values,
        lateness=float(np.percentile(run.lateness, 99)) if run.lateness else 0.0,
        errors=dict(Counter(a.error for a in run.answers if a.error)),
    )


def request_latencies(answer: Answer) -> dict[str, float]:
    """TTFT, TPOT and E2EL of a completed request; a single token has a TPOT of 0."""
    ttft, e2el = answer.times[0] - answer.sent, answer.times[-1] - answer.sent
    return {"ttft": ttft, "e2el": e2el, "tpot": (e2el - ttft) / max(answer.output_tokens - 1, 1)}


def in_flight(answers: Iterable[Answer]) -> tuple[list[float], list[int]]:
    """When the number of requests under way changed, and to what."""
    # At one moment ends come before beginnings.
    changes = sorted([(a.sent, 1) for a in answers] + [(a.ended, -1) for a in answers])
    return [at for at, _ in changes], np.cumsum([change for _, change in changes]).tolist()
