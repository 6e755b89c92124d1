"""The command `engine profile`; `engine/cli/main.py` adds it, and lends it its decorators."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click

from engine.config import EngineConfig
from engine.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from engine.cli.bench.workload import Workload
    from engine.cli.profile.advice import Finding
    from engine.cli.profile.report import Report
    from engine.engine import Engine
    from engine.observe.records import Profile

LIVE_SECONDS = 0.25

OUTPUT = click.Path(dir_okay=False, allow_dash=True)

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def profile_command(settings: Callable[..., Decorator], debuggable: Decorator) -> click.Command:
    """The command, with a flag for each field of EngineConfig by `settings`, and errors handled by `debuggable`."""

    @click.command()
    @click.option("--num-prompts", "--batch", default=32, show_default=True, help="Requests to send.")
    @click.option("--input-len", default=128, show_default=True, help="Tokens of each prompt.")
    @click.option("--output-len", default=64, show_default=True, help="Tokens to produce for each.")
    @click.option(
        "--request-rate", default=float("inf"), show_default=True,
        help="Arrivals per second, exponentially spaced, whatever the engine does; inf sends all at once.",
    )  # fmt: skip
    @click.option("--shared-prefix-len", default=0, show_default=True, help="Leading tokens all prompts share.")
    @click.option("--trace", type=OUTPUT, help="Write a Chrome trace, for ui.perfetto.dev; - is stdout.")
    @click.option("--csv", type=OUTPUT, help="Write one line per iteration; - is stdout.")
    @click.option("--json", type=OUTPUT, help="Write the report; - is stdout.")
    @click.option("--html", type=OUTPUT, help="Write one HTML file with charts; - is stdout.")
    @settings(EngineConfig)
    @debuggable
    def profile(
        trace: str | None, csv: str | None, json: str | None, html: str | None,
        num_prompts: int, input_len: int, output_len: int, request_rate: float, shared_prefix_len: int, **flags: Any,
    ) -> None:  # fmt: skip
        """Run a workload on MODEL in this process and say where the time goes.

        Prompts are random token ids, drawn with --seed, and decoded greedily to their full length.
        """
        import uvloop
        from rich.console import Console

        from engine.cli.bench.workload import Workload

        if not 0 <= shared_prefix_len <= input_len:
            raise ConfigError(f"shared_prefix_len: {shared_prefix_len} must be from 0 to input_len, {input_len}")
        workload = Workload(
            num_prompts=num_prompts, input_len=input_len - shared_prefix_len, prefix_len=shared_prefix_len,
            output_len=output_len, request_rate=request_rate, seed=flags["seed"],
        )  # fmt: skip
        config = EngineConfig(**flags)
        # An open loop: the queue holds whatever arrives.
        config = replace(config, max_queued_requests=max(config.max_queued_requests, num_prompts))
        paths = {_write_trace: trace, _write_table: csv, _write_numbers: json, _write_page: html}
        # The tables make way where a file goes to stdout.
        console = Console(stderr="-" in paths.values())
        with ExitStack() as stack:  # opened first: a path that cannot be written should not cost a run
            files = {
                write: stack.enter_context(click.open_file(path, "w", encoding="utf-8"))
                for write, path in paths.items()
                if path is not None
            }
            result = _result(*uvloop.run(_run(config, workload, console)))
            _print(console, result)
            for write, file in files.items():
                write(result, file)

    return profile


class Result(NamedTuple):
    """What is reported."""

    profile: "Profile"
    config: EngineConfig
    report: "Report"
    limit: "Finding"
    symptoms: "list[Finding]"


def _result(profile: "Profile", config: EngineConfig) -> Result:
    from engine.cli.profile.advice import bottleneck, symptoms
    from engine.cli.profile.report import make_report

    report = make_report(profile, config)
    return Result(profile, config, report, bottleneck(report), symptoms(report))


def _print(console: "Console", result: Result) -> None:
    """Tables on the terminal."""
    from engine.cli.profile.display import print_report

    print_report(console, result.report, result.limit, result.symptoms)


def _write_trace(result: Result, file: IO[str]) -> None:
    """As a Chrome trace."""
    from engine.observe.chrome_trace import chrome_trace

    json.dump(chrome_trace(result.profile.iterations, result.profile.requests), file)


def _write_table(result: Result, file: IO[str]) -> None:
    """As CSV, a line per iteration."""
    from engine.cli.profile.report import write_csv

    write_csv(result.profile.iterations, file)


def _write_numbers(result: Result, file: IO[str]) -> None:
    """As JSON."""
    findings = {"bottleneck": result.limit._asdict(), "symptoms": [f._asdict() for f in result.symptoms]}
    json.dump(result.report.as_dict() | findings, file, indent=2)


def _write_page(result: Result, file: IO[str]) -> None:
    """As HTML."""
    from engine.cli.profile.page import make_page

    file.write(make_page(result.profile, result.config, result.report, result.limit, result.symptoms).render())


async def _run(config: EngineConfig, workload: "Workload", console: "Console") -> "tuple[Profile, EngineConfig]":
    """The profile, and the config as the engine completed it."""
    from engine.cli.profile.workload import run, warm_up
    from engine.engine import Engine

    async with Engine(config) as engine:
        await warm_up(engine)
        with _live(engine, console):
            engine.start_profile()
            await run(engine, workload)
        return engine.stop_profile(), engine.config


@contextmanager
def _live(engine: "Engine", console: "Console") -> Iterator[None]:
    """Show a table of the last iterations while the block runs, on a terminal."""
    if not console.is_terminal:
        yield
        return
    from rich.live import Live

    from engine.cli.profile.display import live_table

    async def refresh(live: Live) -> None:
        while True:
            live.update(live_table(engine.records.iterations), refresh=True)
            await asyncio.sleep(LIVE_SECONDS)

    # Drawn once before the profile starts: the first time takes 0.2 s, which the loop would show as waiting.
    first = live_table(engine.records.iterations)
    with Live(first, console=console, auto_refresh=False, transient=True) as live:
        live.refresh()
        task = asyncio.get_running_loop().create_task(refresh(live))
        try:
            yield
        finally:
            task.cancel()
