"""What `engine bench` prints: vLLM's lines as a table, the latencies side by side."""

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from engine.cli.bench.metrics import LATE, LATENCIES, Metrics

STATISTICS = ("mean", "median", "p90", "p99")


def print_metrics(console: Console, metrics: Metrics) -> None:
    """Counts and rates, latencies, and what should not be overlooked."""
    table = Table("", Column(justify="right"), show_header=False, box=SIMPLE)
    for name, value in counts(metrics):
        table.add_row(name, value)
    console.print(table)
    columns = (Column(heading, justify="right", no_wrap=True) for heading in STATISTICS)
    table = Table("latency, ms", *columns, box=SIMPLE)
    for row in latency_rows(metrics):
        table.add_row(*row)
    console.print(table)
    for line in warnings(metrics):
        console.print(line, style="bold", highlight=False, soft_wrap=True)


def latency_rows(metrics: Metrics) -> Iterator[tuple[str, ...]]:
    """Name and STATISTICS of each latency, in milliseconds."""
    for name, latency in metrics.latencies.items():
        values = (getattr(latency, statistic) for statistic in STATISTICS)
        yield f"{LATENCIES[name]} ({name.upper()})", *(f"{1e3 * v:.2f}" for v in values)


def counts(m: Metrics) -> Iterator[tuple[str, str]]:
    """Everything but latencies, for people."""
    yield "requests completed", f"{m.completed}"
    yield "requests failed", f"{m.failed}"
    yield "most at one time", f"{m.max_concurrent_requests}"
    yield "duration, s", f"{m.duration:.2f}"
    yield "prompt tokens", f"{m.total_input_tokens}"
    yield "output tokens", f"{m.total_output_tokens}"
    yield "requests/s", f"{m.request_throughput:.2f}"
    if m.request_goodput is not None:
        yield "requests/s within the objectives (goodput)", f"{m.request_goodput:.2f}"
    yield "output tokens/s", f"{m.output_throughput:.2f}"
    yield "prompt and output tokens/s", f"{m.total_token_throughput:.2f}"


def warnings(metrics: Metrics) -> Iterator[str]:
    """Failures by reason, and a client that was late."""
    for error, count in metrics.errors.items():
        yield f"{count} failed: {error}"
    if metrics.lateness > LATE:
        yield (
            f"The client was late by {1e3 * metrics.lateness:.0f} ms (p99): its times include its own slowness. "
            "Give it a core of its own, or lower the load."
        )
