"""A profile taken, printed and written. Read next: `engine/cli/profile/report.py`, `engine/cli/profile/workload.py`."""

import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any, NamedTuple

import uvloop
from rich.console import Console
from rich.live import Live

from engine.cli.bench.load import interrupted
from engine.cli.bench.workload import Workload
from engine.cli.profile.advice import bottleneck, symptoms
from engine.cli.profile.display import live_table, print_report
from engine.cli.profile.page import make_page
from engine.cli.profile.report import Report, make_report, write_csv
from engine.cli.profile.workload import run, warm_up
from engine.config import EngineConfig
from engine.engine import Engine
from engine.observe.chrome_trace import chrome_trace
from engine.observe.model_info import ModelInfo
from engine.observe.records import Profile
from loader.progress import LINE_SECONDS

LIVE_SECONDS = 0.25


class Result(NamedTuple):
    """What is reported.

    Attributes:
        config: as the engine completed it.
        facts: what was measured, and where.
        is_whole: nobody has interrupted it.
    """

    profile: Profile
    config: EngineConfig
    report: Report
    facts: dict[str, Any]
    is_whole: bool


def run_profile(config: EngineConfig, workload: Workload, console: Console) -> Result:
    """Run the workload on a new engine and print the report; what was done by then, when it is interrupted."""
    result = uvloop.run(_run(config, workload, console))
    print_report(console, result.report)
    return result


async def _run(config: EngineConfig, workload: Workload, console: Console) -> Result:
    async with Engine(config) as engine:
        await warm_up(engine)
        with _live(engine, console):
            engine.start_profile()
            is_whole = not await interrupted(run(engine, workload))
        profile = engine.stop_profile()
        if not is_whole and not profile.iterations:
            raise KeyboardInterrupt
        facts = _facts(engine.info, engine.config, workload)
        return Result(profile, engine.config, make_report(profile, engine.config), facts, is_whole)


def _facts(info: ModelInfo, config: EngineConfig, workload: Workload) -> dict[str, Any]:
    rate = "all at once" if workload.request_rate == math.inf else f"{workload.request_rate:g} requests/s"
    prompt = workload.prefix_len + workload.input_len
    shared = f", {workload.prefix_len} of them shared" if workload.prefix_len else ""
    return {
        "device": info.device,
        "dtype": info.dtype,
        "quantization": config.quantization,
        "engine": info.version,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "workload": f"{workload.num_prompts} prompts of {prompt} tokens{shared}, {workload.output_len} out, {rate}",
    }


@contextmanager
def _live(engine: Engine, console: Console) -> Iterator[None]:
    """Show the last iterations while the block runs: a table on a terminal, elsewhere a line now and then."""
    if not console.is_terminal:
        task = asyncio.get_running_loop().create_task(_tell(engine))
        try:
            yield
        finally:
            task.cancel()
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


async def _tell(engine: Engine) -> None:
    while True:
        await asyncio.sleep(LINE_SECONDS)
        last = engine.records.iterations[-1]
        done = f"{engine.num_iterations} iterations, {last.running} running, {last.waiting} waiting"
        print(f"profile: {done}", file=sys.stderr, flush=True)


def _write_trace(result: Result, file: IO[str]) -> None:
    json.dump(chrome_trace(result.profile.iterations, result.profile.requests), file)


def _write_numbers(result: Result, file: IO[str]) -> None:
    report = result.report
    findings = {"bottleneck": bottleneck(report)._asdict(), "symptoms": [f._asdict() for f in symptoms(report)]}
    json.dump(result.facts | report.as_dict() | findings, file, indent=2)


WRITERS: tuple[Callable[[Result, IO[str]], object], ...] = (
    _write_trace,
    lambda result, file: write_csv(result.profile.iterations, file),
    _write_numbers,
    lambda result, file: file.write(make_page(*result[:4]).render()),
)
"""Chrome trace, CSV, JSON and HTML."""
