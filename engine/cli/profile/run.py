"""A profile taken, printed and written. Read next: `engine/cli/profile/report.py`, `engine/cli/profile/workload.py`."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple

import uvloop
from rich.console import Console
from rich.live import Live

from engine.cli.bench.workload import Workload
from engine.cli.profile.advice import bottleneck, symptoms
from engine.cli.profile.display import live_table, print_report
from engine.cli.profile.page import make_page
from engine.cli.profile.report import Report, make_report, write_csv
from engine.cli.profile.workload import run, warm_up
from engine.config import EngineConfig
from engine.engine import Engine
from engine.observe.chrome_trace import chrome_trace
from engine.observe.records import Profile

LIVE_SECONDS = 0.25


class Result(NamedTuple):
    """What is reported; `config` is as the engine completed it."""

    profile: Profile
    config: EngineConfig
    report: Report


def run_profile(config: EngineConfig, workload: Workload, console: Console) -> Result:
    """Run the workload on a new engine and print the report."""
    profile, config = uvloop.run(_run(config, workload, console))
    report = make_report(profile, config)
    print_report(console, report)
    return Result(profile, config, report)


async def _run(config: EngineConfig, workload: Workload, console: Console) -> tuple[Profile, EngineConfig]:
    async with Engine(config) as engine:
        await warm_up(engine)
        with _live(engine, console):
            engine.start_profile()
            await run(engine, workload)
        return engine.stop_profile(), engine.config


@contextmanager
def _live(engine: Engine, console: Console) -> Iterator[None]:
    """Show a table of the last iterations while the block runs, on a terminal."""
    if not console.is_terminal:
        yield
        return

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


def _write_trace(result: Result, file: IO[str]) -> None:
    json.dump(chrome_trace(result.profile.iterations, result.profile.requests), file)


def _write_numbers(result: Result, file: IO[str]) -> None:
    report = result.report
    findings = {"bottleneck": bottleneck(report)._asdict(), "symptoms": [f._asdict() for f in symptoms(report)]}
    json.dump(report.as_dict() | findings, file, indent=2)


WRITERS: tuple[Callable[[Result, IO[str]], object], ...] = (
    _write_trace,
    lambda result, file: write_csv(result.profile.iterations, file),
    _write_numbers,
    lambda result, file: file.write(make_page(*result).render()),
)
"""Chrome trace, CSV, JSON and HTML."""
