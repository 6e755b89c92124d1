"""A load as a page: what `display.py` prints, and every request over time."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.cli.bench.display import STATISTICS, counts, latency_rows, warnings
from engine.cli.bench.load import Answer, Run
from engine.cli.bench.metrics import Metrics, in_flight
from engine.cli.html.page import Chart, Finding, Lanes, Page, Row, Series, Table, Tile

_WINDOWS = 120
"""Columns of the throughput's chart."""


def make_page(run: Run, metrics: Metrics, settings: dict[str, Any]) -> Page:
    """The page of `metrics`, which were made of `run`; `settings` say how it was loaded."""
    m = metrics
    tiles = [
        Tile("output throughput", f"{m.output_throughput:.1f} tok/s", f"{m.total_output_tokens} tokens"),
        Tile("requests", f"{m.request_throughput:.2f} /s", f"{m.completed} completed, {m.failed} failed"),
        *(
            Tile(f"{name.upper()}, median", f"{1e3 * x.median:.2f} ms", f"p99 {1e3 * x.p99:.2f} ms")
            for name, x in m.latencies.items()
            if name != "itl"
        ),
        Tile("most at one time", f"{m.max_concurrent_requests}", "requests"),
        Tile("client late", f"{1e3 * m.lateness:.1f} ms", "p99"),
    ]
    if m.request_goodput is not None:
        tiles.insert(2, Tile("goodput", f"{m.request_goodput:.2f} /s", f"within {settings['goodput']} ms"))
    return Page(
        title=f"Load on {settings['model_id']}",
        subtitle=f"{m.completed} requests completed, {m.failed} failed, in {m.duration:.1f} s",
        facts={name.replace("_", " "): value for name, value in settings.items() if name != "model_id"},
        origin=run.started,
        tiles=tiles,
        findings=[Finding("Note", line) for line in warnings(metrics)],
        charts=[_throughput(run), _concurrency(run.answers), _lanes(run.answers)],
        tables=[
            Table(("latency, ms", *STATISTICS), [Row(row, v) for row, v in _latencies(m)], unit="ms"),
            Table(("counts", ""), [Row(row) for row in counts(m)]),
        ],
        numbers=settings | m.as_dict(),
    )


def _latencies(m: Metrics) -> Iterator[tuple[tuple[str, ...], list[float]]]:
    for row, values in zip(latency_rows(m), m.values.values(), strict=True):
        yield row, [1e3 * v for v in values]


def _throughput(run: Run) -> Chart:
    """Messages stand for their share of the answer's tokens."""
    edges = np.linspace(run.started, max(run.ended, run.started + 1e-9), _WINDOWS + 1)
    width = edges[1] - edges[0]
    times = [t for a in run.answers for t in a.times]
    tokens = [a.output_tokens / len(a.times) for a in run.answers for _ in a.times]
    values = np.histogram(times, edges, weights=tokens)[0] / width
    note = f"In windows of {1e3 * width:.0f} ms."
    series = [Series("output tokens/s", "c1", values.tolist())]
    return Chart("bars", "Output throughput", note, "tok/s", edges[:-1].tolist(), edges[1:].tolist(), series)


def _concurrency(answers: list[Answer]) -> Chart:
    starts, values = in_flight(answers)
    series = [Series("under way", "c1", values)]
    return Chart(
        "lines", "Requests under way", "Sent and not ended.", "requests", starts, [*starts[1:], starts[-1]], series
    )


def _lanes(answers: list[Answer]) -> Lanes:
    spans = []
    for number, a in enumerate(answers, 1):
        first = a.times[0] if a.times else a.ended
        label = f"request {number}: {a.prompt_tokens} prompt tokens, {a.output_tokens} answered"
        spans.append((f"{label}, {a.error}" if a.error else label, (a.due, a.sent, first, a.ended)))
    parts = (("late, or held back", "c6"), ("until the first token", "c2"), ("tokens", "c1"))
    return Lanes("Requests", "Each in the lowest free lane.", parts, spans)
