"""Tables of a profile for people: a live one while it runs, the full ones after."""

from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

from engine.cli.profile.advice import Finding
from engine.cli.profile.report import Distribution, Report, distribution
from engine.observe.records import DEVICE, PHASES, IterationRecord

LIVE_ITERATIONS = 100
"""Iterations behind the live table's medians."""


def live_table(iterations: Iterable[IterationRecord]) -> Table:
    """The last iterations at a glance."""
    recent = list(iterations)[-LIVE_ITERATIONS:]
    table = Table(title=f"last {len(recent)} iterations")
    for heading in ("running", "waiting", "tokens/step", "sampled/s", "KV use", "host ms", "wait ms", "device ms"):
        table.add_column(heading, justify="right")
    if recent:
        last = recent[-1]
        seconds = sum(i.seconds + i.idle for i in recent)
        table.add_row(
            str(last.running),
            str(last.waiting),
            f"{distribution(i.tokens for i in recent).p50:.0f}",
            f"{sum(i.sampled for i in recent) / seconds:.0f}" if seconds else "",
            f"{last.kv_usage:.0%}",
            ms(distribution(i.seconds - i.phases[DEVICE] for i in recent).p50),
            ms(distribution(i.phases[DEVICE] for i in recent).p50),
            ms(distribution(i.device_seconds for i in recent).p50),
        )
    return table


def print_report(console: Console, report: Report, limit: Finding, found: Iterable[Finding]) -> None:
    """Everything, and the advice last, where the eye is."""
    console.print(_time_table(report))
    console.print(_batch_table(report))
    console.print(_request_table(report))
    console.print()
    for line in summary(report):
        console.print(line, highlight=False, soft_wrap=True)
    for label, finding in (("Bottleneck", limit), *(("Also", f) for f in found)):
        console.print(f"\n{label}: {finding.name}", style="bold", highlight=False, soft_wrap=True)
        console.print(f"  {finding.evidence}.\n  {finding.advice}", highlight=False, soft_wrap=True)


def time_rows(r: Report) -> list[tuple[str, Distribution]]:
    """Phases, then what they add up to and what the device measured; seconds."""
    phases = [("device (wait)" if name == "device" else name, r.phases[name]) for name in PHASES]
    return [*phases, ("iteration", r.iteration), ("device busy", r.device)]


def batch_rows(r: Report) -> list[tuple[str, Distribution, str, str]]:
    """With the formats of values and mean."""
    counts = (
        ("tokens", r.tokens), ("prefill rows", r.prefill_rows), ("decode rows", r.decode_rows),
        ("running", r.running), ("waiting", r.waiting),
    )  # fmt: skip
    shares = (("KV blocks used", r.kv_usage), ("their slots that hold tokens", r.kv_fill))
    return [*((name, d, ".0f", ".1f") for name, d in counts), *((name, d, ".0%", ".0%") for name, d in shares)]


def request_rows(r: Report) -> list[tuple[str, Distribution]]:
    """Latencies in seconds."""
    return [
        ("queue time", r.queue_time),
        ("time to first token", r.time_to_first_token),
        ("time per output token", r.time_per_output_token),
        ("end to end", r.e2e_latency),
    ]


def _time_table(r: Report) -> Table:
    table = _table("phase of an iteration, ms", "share of wall")
    for name, d in time_rows(r):
        if name == "iteration":
            table.add_section()
        table.add_row(name, *percentiles(d, ms), wall_share(r, d))
    return table


def _batch_table(r: Report) -> Table:
    table = _table("batch", "mean")
    for name, d, form, mean_form in batch_rows(r):
        table.add_row(name, *percentiles(d, f"{{:{form}}}".format), format(d.mean, mean_form))
    return table


def _request_table(r: Report) -> Table:
    table = _table("request, ms", "mean")
    for name, d in request_rows(r):
        table.add_row(name, *percentiles(d, ms), ms(d.mean))
    return table


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


def _table(first: str, last: str) -> Table:
    table = Table(first)
    for heading in ("p50", "p90", "p99", "max", last):
        table.add_column(heading, justify="right")
    return table


def percentiles(d: Distribution, form: Callable[[float], str]) -> tuple[str, ...]:
    """p50, p90, p99 and the greatest value."""
    return form(d.p50), form(d.p90), form(d.p99), form(d.max)


def ms(seconds: float) -> str:
    """Milliseconds, to the microsecond."""
    return f"{seconds * 1e3:.3f}"


def wall_share(r: Report, d: Distribution) -> str:
    """Part of the wall time."""
    return f"{d.total / r.wall if r.wall else 0:.1%}"
