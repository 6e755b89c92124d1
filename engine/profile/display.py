"""Tables of a profile for people: a live one while it runs, the full ones after."""

from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

from engine.profile.advice import Finding
from engine.profile.report import Distribution, Report, distribution
from engine.trace import DEVICE, PHASES, IterationRecord

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
            _ms(distribution(i.seconds - i.phases[DEVICE] for i in recent).p50),
            _ms(distribution(i.phases[DEVICE] for i in recent).p50),
            _ms(distribution(i.device_seconds for i in recent).p50),
        )
    return table


def print_report(console: Console, report: Report, limit: Finding, found: Iterable[Finding]) -> None:
    """Everything, and the advice last, where the eye is."""
    console.print(_time_table(report))
    console.print(_batch_table(report))
    console.print(_request_table(report))
    for line in _summary(report):
        console.print(line, highlight=False, soft_wrap=True)
    for label, finding in (("Bottleneck", limit), *(("Also", f) for f in found)):
        console.print(f"\n{label}: {finding.name}", style="bold", highlight=False, soft_wrap=True)
        console.print(f"  {finding.evidence}.\n  {finding.advice}", highlight=False, soft_wrap=True)


def _time_table(r: Report) -> Table:
    table = _table("phase of an iteration, ms", "share of wall")
    for name in PHASES:
        d = r.phases[name]
        table.add_row(
            "device (wait)" if name == "device" else name, *_all(d, _ms), f"{d.total / r.wall if r.wall else 0:.1%}"
        )
    table.add_section()
    table.add_row("iteration", *_all(r.iteration, _ms), f"{r.iteration.total / r.wall if r.wall else 0:.1%}")
    table.add_row("device busy", *_all(r.device, _ms), f"{r.device_busy / r.wall if r.wall else 0:.1%}")
    return table


def _batch_table(r: Report) -> Table:
    table = _table("batch", "mean")
    for name, d in (
        ("tokens", r.tokens),
        ("prefill rows", r.prefill_rows),
        ("decode rows", r.decode_rows),
        ("running", r.running),
        ("waiting", r.waiting),
    ):
        table.add_row(name, *_all(d, "{:.0f}".format), f"{d.mean:.1f}")
    for name, d in (("KV blocks used", r.kv_usage), ("their slots that hold tokens", r.kv_fill)):
        table.add_row(name, *_all(d, "{:.0%}".format), f"{d.mean:.0%}")
    return table


def _request_table(r: Report) -> Table:
    table = _table("request, ms", "mean")
    for name, d in (
        ("queue time", r.queue_time),
        ("time to first token", r.time_to_first_token),
        ("time per output token", r.time_per_output_token),
        ("end to end", r.e2e_latency),
    ):
        table.add_row(name, *_all(d, _ms), _ms(d.mean))
    return table


def _summary(r: Report) -> list[str]:
    seconds = r.wall or 1.0
    return [
        f"\n{r.num_requests} requests, {r.num_iterations} iterations, {r.prompt_tokens} prompt tokens "
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


def _all(d: Distribution, form: Callable[[float], str]) -> tuple[str, ...]:
    return form(d.p50), form(d.p90), form(d.p99), form(d.max)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
