"""The command `engine profile`; `engine/cli.py` adds it, and lends it its decorators."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

import click

from engine.config import EngineConfig

if TYPE_CHECKING:
    from rich.console import Console

    from engine.engine import Engine
    from engine.profile.workload import Workload
    from engine.trace import Profile

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
    @settings(EngineConfig)
    @debuggable
    def profile(trace: str | None, csv: str | None, json: str | None, **flags: Any) -> None:
        """Run a workload on MODEL in this process and say where the time goes.

        Prompts are random token ids, drawn with --seed, and decoded greedily to their full length.
        """
        import uvloop
        from rich.console import Console

        from engine.profile.workload import Workload

        names = ("num_prompts", "input_len", "output_len", "request_rate", "shared_prefix_len")
        workload = Workload(**{name: flags.pop(name) for name in names}, seed=flags["seed"])
        config = EngineConfig(**flags)
        # An open loop: the queue holds whatever arrives.
        config = replace(config, max_queued_requests=max(config.max_queued_requests, workload.num_prompts))
        # The tables make way where a file goes to stdout.
        console = Console(stderr="-" in (trace, csv, json))
        with ExitStack() as stack:  # opened first: a path that cannot be written should not cost a run
            files = [
                None if path is None else stack.enter_context(click.open_file(path, "w")) for path in (trace, csv, json)
            ]
            records = uvloop.run(_run(config, workload, console))
            _report(records, config, console, *files)

    return profile


def _report(
    profile: "Profile",
    config: EngineConfig,
    console: "Console",
    trace: IO[str] | None,
    table: IO[str] | None,
    numbers: IO[str] | None,
) -> None:
    from engine.profile.advice import bottleneck, symptoms
    from engine.profile.display import print_report
    from engine.profile.report import make_report, write_csv
    from engine.trace import chrome_trace

    report = make_report(profile, config)
    limit, found = bottleneck(report), symptoms(report)
    print_report(console, report, limit, found)
    if trace:
        json.dump(chrome_trace(profile.iterations, profile.requests), trace)
    if table:
        write_csv(profile.iterations, table)
    if numbers:
        findings = {"bottleneck": limit._asdict(), "symptoms": [f._asdict() for f in found]}
        json.dump(report.as_dict() | findings, numbers, indent=2)


async def _run(config: EngineConfig, workload: "Workload", console: "Console") -> "Profile":
    from engine.engine import Engine
    from engine.profile.workload import run, warm_up

    async with Engine(config) as engine:
        await warm_up(engine)
        with _live(engine, console):
            engine.start_profile()
            await run(engine, workload)
        return engine.stop_profile()


@contextmanager
def _live(engine: "Engine", console: "Console") -> Iterator[None]:
    """Show a table of the last iterations while the block runs, on a terminal."""
    if not console.is_terminal:
        yield
        return
    from rich.live import Live

    from engine.profile.display import live_table

    async def refresh(live: Live) -> None:
        while True:
            live.update(live_table(engine.trace.iterations), refresh=True)
            await asyncio.sleep(LIVE_SECONDS)

    # Drawn once before the profile starts: the first time takes 0.2 s, which the loop would show as waiting.
    first = live_table(engine.trace.iterations)
    with Live(first, console=console, auto_refresh=False, transient=True) as live:
        live.refresh()
        task = asyncio.get_running_loop().create_task(refresh(live))
        try:
            yield
        finally:
            task.cancel()
