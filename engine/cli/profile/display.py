"""Tables of a profile for people: a live one while it runs, the full ones after."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from engine.cli.profile.advice import labelled
from engine.cli.profile.report import Distribution, Report, distribution
from engine.observe.records import DEVICE, PHASES, IterationRecord

TextTable: TypeAlias = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Headings and rows."""

LIVE_ITERATIONS = 100
"""Iterations behind the live table's medians."""


def live_table(iterations: Iterable[IterationRecord]) -> Table:
    """The last iterations at a glance."""
    recent = list(iterations)[-LIVE_ITERATIONS:]
    headings = ("running", "waiting", "tokens/step", "sampled/s", "KV use", "host ms", "wait ms", "device ms")
    columns = (Column(h, justify="right", no_wrap=True) for h in headings)
    table = Table(*columns, title=f"last {len(recent)} iterations", box=SIMPLE, padding=(0, 1, 0, 0))
    if recent:
        last = recent[-1]
        seconds = sum(i.seconds + i.idle for i in recent)
        table.add_row(
            str(last.running),
            str(last.waiting),
            f"{distribution(i.tokens for i in recent).p50:.0f}",
            f"{sum(i.sampled for i in recent) / seconds:.0f}" if seconds else "",
            f"{last.kv_usage:.0%}",
            _ms(distribution(i.seconds - i.phases[DEVICE] for i in recent).p50),
            _ms(distribution(i.phases[DEVICE] for i in recent).p50),
            _ms(distribution(i.device_seconds for i in recent).p50),
        )
    return table


def print_report(console: Console, report: Report) -> None:
    """Everything, and the advice last, where the eye is."""
    for headings, rows in (time_table(report), batch_table(report), request_table(report)):
        columns = (Column(heading, justify="right", no_wrap=True) for heading in headings[1:])
        table = Table(Column(headings[0], no_wrap=True), *columns, box=SIMPLE)  # fits 80 columns
        for row in rows:
            if row[0] == "iteration":
                table.add_section()
            table.add_row(*row)
        console.print(table)
    console.print()
    for line in summary(report):
        console.print(line, highlight=False, soft_wrap=True)
    for label, finding in labelled(report):
        console.print(f"\n{label}: {finding.name}", style="bold", highlight=False, soft_wrap=True)
        console.print(f"  {finding.evidence}.\n  {finding.advice}", highlight=False, soft_wrap=True)


def time_table(r: Report) -> TextTable:
    """Phases, then what they add up to and what the device measured."""
    phases = [("device (wait)" if name == "device" else name, r.phases[name]) for name in PHASES]
    times = [*phases, ("iteration", r.iteration), ("device busy", r.device)]
    rows = [(name, *_percentiles(d, _ms), f"{d.total / r.wall if r.wall else 0:.1%}") for name, d in times]
    return _headings("phase of an iteration, ms", "of wall"), rows


def batch_table(r: Report) -> TextTable:
    """Tokens, rows and blocks of a step."""
    counts = (
        ("tokens", r.tokens), ("prefill rows", r.prefill_rows), ("decode rows", r.decode_rows),
        ("running", r.running), ("waiting", r.waiting),
    )  # fmt: skip
    shares = (("KV blocks used", r.kv_usage), ("their slots that hold tokens", r.kv_fill))
    rows = [(name, *_percentiles(d, "{:.0f}".format), f"{d.mean:.1f}") for name, d in counts]
    rows += [(name, *_percentiles(d, "{:.0%}".format), f"{d.mean:.0%}") for name, d in shares]
    return _headings("batch", "mean"), rows


def request_table(r: Report) -> TextTable:
    """Latencies."""
    latencies = (
        ("queue time", r.queue_time),
        ("time to first token", r.time_to_first_token),
        ("time per output token", r.time_per_output_token),
        ("end to end", r.e2e_latency),
    )
    return _headings("request, ms", "mean"), [(name, *_percentiles(d, _ms), _ms(d.mean)) for name, d in latencies]


def summary(r: Report) -> list[str]:
    """Counts, and how the wall time splits."""
    seconds = r.wall or 1.0
    return [
        f"{r.num_requests} requests, {r.num_iterations} iterations, {r.prompt_tokens} prompt tokens "
        f"({r.cached_tokens} from the prefix cache), {r.output_tokens} sampled: {r.output_tokens / seconds:.1f} "
        f"tokens/s; {r.preemptions} preemptions",
        f"wall {r.wall:.3f} s = host {r.host:.3f} + waiting for the device {r.device_wait:.3f} + idle {r.idle:.3f}, "
        f"residual {r.residual:.6f} ({abs(r.residual) / seconds:.2%})",
        f"device busy {r.device_busy:.3f} s; host exposed {r.host_exposed:.3f} s, hand-over {r.hand_over:.3f} s",
    ]


def _headings(first: str, last: str) -> tuple[str, ...]:
    return (first, "p50", "p90", "p99", "max", last)


def _percentiles(d: Distribution, form: Callable[[float], str]) -> tuple[str, ...]:
    return form(d.p50), form(d.p90), form(d.p99), form(d.max)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 1 else f"{seconds * 1e3:.1f}"
