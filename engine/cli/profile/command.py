"""The command `engine profile`. Read next: `engine/cli/profile/run.py`, imported when it runs."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import click

from engine.cli.debuggable import INTERRUPTED, debuggable
from engine.cli.settings import LAYERS
from engine.config import EngineConfig
from engine.errors import ConfigError

OUTPUT = click.Path(dir_okay=False, allow_dash=True)


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
@LAYERS.options(EngineConfig)
@debuggable
def profile(
    trace: str | None, csv: str | None, json: str | None, html: str | None,
    num_prompts: int, input_len: int, output_len: int, request_rate: float, shared_prefix_len: int, **flags: Any,
) -> None:  # fmt: skip
    """Run a workload on MODEL in this process and say where the time goes.

    Prompts are random token ids, drawn with --seed, and decoded greedily to their full length.
    """
    from rich.console import Console

    from engine.cli.bench.workload import Workload
    from engine.cli.profile.run import WRITERS, run_profile

    if not 0 <= shared_prefix_len <= input_len:
        raise ConfigError(f"shared_prefix_len: {shared_prefix_len} must be from 0 to input_len, {input_len}")
    workload = Workload(
        num_prompts=num_prompts, input_len=input_len - shared_prefix_len, prefix_len=shared_prefix_len,
        output_len=output_len, request_rate=request_rate, seed=flags["seed"],
    )  # fmt: skip
    config = EngineConfig(**flags)
    # An open loop: the queue holds whatever arrives.
    config = replace(config, max_queued_requests=max(config.max_queued_requests, num_prompts))
    paths = [(write, path) for write, path in zip(WRITERS, (trace, csv, json, html), strict=True) if path is not None]
    # The tables make way where a file goes to stdout.
    console = Console(stderr="-" in (trace, csv, json, html))
    with ExitStack() as stack:  # opened first: a path that cannot be written should not cost a run
        files = [(w, stack.enter_context(click.open_file(path, "w", encoding="utf-8"))) for w, path in paths]
        result = run_profile(config, workload, console)
        for write, file in files:
            write(result, file)
    if not result.is_whole:
        click.echo("engine: interrupted: the report is of what was done by then", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
