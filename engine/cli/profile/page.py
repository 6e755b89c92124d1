"""A profile as a page: what `display.py` prints, and what every iteration and request did, over time."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from engine.cli.html.page import Chart, Finding, Lanes, Page, Row, Series, Table, Tile
from engine.cli.profile.advice import labelled
from engine.cli.profile.display import TextTable, batch_table, request_table, summary, time_table
from engine.cli.profile.report import Distribution, Report
from engine.config import EngineConfig
from engine.observe.records import PHASES, IterationRecord, Profile, RequestRecord

_COLOURS = dict(zip(PHASES, ("c1", "c2", "c3", "c4", "c5", "c8", "c6", "c7"), strict=True))
"""The wait for the device is grey: in a healthy run it is nearly everything."""


def make_page(profile: Profile, config: EngineConfig, report: Report, facts: Mapping[str, Any]) -> Page:
    """The page of `report`, which was made of `profile`; `facts` say what was measured, and where."""
    iterations, requests = profile.iterations, profile.requests
    model = next(iter(config.served_model_names), Path(config.model).name)
    return Page(
        title=f"Profile of {model}",
        subtitle=" · ".join(summary(report)),
        facts=facts,
        origin=min([i.start for i in iterations] + [r.arrival for r in requests], default=0.0),
        tiles=_tiles(report),
        findings=[
            Finding(f"{label}: {f.name}", f"{f.evidence[0].upper()}{f.evidence[1:]}. {f.advice}")
            for label, f in labelled(report)
        ],
        charts=[*_charts(iterations), _lanes(requests)] if iterations else [],
        tables=[
            _table(time_table(report), _times(iterations), unit="ms"),
            _table(batch_table(report)),
            _table(request_table(report), _latencies(requests), unit="ms"),
        ],
        numbers={**facts, **report.as_dict()},
    )


def _tiles(r: Report) -> list[Tile]:
    seconds = r.wall or 1.0
    return [
        Tile("output throughput", f"{r.output_tokens / seconds:.1f} tok/s", f"{r.num_requests} requests"),
        _latency("TTFT", r.time_to_first_token),
        _latency("TPOT", r.time_per_output_token),
        Tile("iteration, median", f"{1e3 * r.iteration.p50:.2f} ms", f"{r.num_iterations} iterations"),
        Tile("device busy", f"{r.device_busy / seconds:.1%}", "of the wall time"),
        Tile("host exposed", f"{r.host_exposed / seconds:.1%}", f"hand-over {r.hand_over / seconds:.1%}"),
        Tile(
            "from the prefix cache",
            f"{r.cached_tokens / r.prompt_tokens if r.prompt_tokens else 0:.0%}",
            f"of {r.prompt_tokens} prompt tokens",
        ),
        Tile("KV blocks used, most", f"{r.kv_usage.max:.0%}", f"{r.preemptions} preemptions"),
    ]


def _latency(name: str, d: Distribution) -> Tile:
    return Tile(f"{name}, median", f"{1e3 * d.p50:.2f} ms", f"p99 {1e3 * d.p99:.2f} ms")


def _charts(iterations: list[IterationRecord]) -> list[Chart]:
    starts, ends = [i.start for i in iterations], [i.start + i.seconds for i in iterations]
    until_next = [*starts[1:], ends[-1]]
    columns = "Where several iterations share a column of the screen, the greatest is drawn."
    return [
        Chart(
            "bars", "Time of each iteration, by phase", columns, "ms", starts, ends,
            [Series(name, _COLOURS[name], [1e3 * i.phases[p] for i in iterations]) for p, name in enumerate(PHASES)],
        ),
        Chart(
            "bars", "Tokens of each step launched", columns, "tokens", starts, ends,
            [
                Series("decode", "c1", [i.decode_rows for i in iterations]),
                Series("prefill", "c2", [i.tokens - i.decode_rows for i in iterations]),
            ],
        ),
        Chart(
            "lines", "Sequences", "At the end of each iteration.", "rows", starts, until_next,
            [
                Series("running", "c1", [i.running for i in iterations]),
                Series("waiting", "c6", [i.waiting for i in iterations]),
            ],
        ),
        Chart(
            "lines", "KV cache", "Share of the blocks in use, and of their slots that hold tokens.", "%",
            starts, until_next,
            [
                Series("used", "c1", [100 * i.kv_usage for i in iterations]),
                Series("filled", "c3", [100 * i.kv_fill for i in iterations]),
            ],
        ),
    ]  # fmt: skip


def _lanes(requests: Iterable[RequestRecord]) -> Lanes:
    spans = []
    for r in requests:
        # A request that ended early has its later parts empty.
        scheduled = r.ended if r.scheduled is None else r.scheduled
        first = r.ended if r.first_token is None else r.first_token
        label = f"{r.request_id}: {r.prompt_tokens} prompt tokens, {r.cached_tokens} cached, {r.output_tokens} sampled"
        spans.append((f"{label}, {r.finish_reason}", (r.arrival, scheduled, first, r.ended)))
    parts = (("queued", "c6"), ("prefill", "c2"), ("decode", "c1"))
    return Lanes("Requests", "Those that ended, each in the lowest free lane.", parts, spans)


def _table(text: TextTable, values: Sequence[Sequence[float]] = (), unit: str = "") -> Table:
    """`values` are drawn beside the rows, a distribution each."""
    headings, rows = text
    return Table(headings, [Row(row, v) for row, v in zip_longest(rows, values, fillvalue=())], unit=unit)


def _times(iterations: list[IterationRecord]) -> list[list[float]]:
    """What `time_table` is made of, in ms."""
    phases = [[1e3 * i.phases[p] for i in iterations] for p in range(len(PHASES))]
    return [*phases, [1e3 * i.seconds for i in iterations], [1e3 * i.device_seconds for i in iterations if i.settled]]


def _latencies(requests: list[RequestRecord]) -> list[list[float]]:
    """What `request_table` is made of, in ms."""
    return [
        [1e3 * (q.scheduled - q.arrival) for q in requests if q.scheduled is not None],
        [1e3 * (q.first_token - q.arrival) for q in requests if q.first_token is not None],
        [1e3 * q.time_per_output_token for q in requests if q.time_per_output_token is not None],
        [1e3 * (q.ended - q.arrival) for q in requests],
    ]
