"""The command `engine bench`. Read next: `engine/cli/bench/run.py`, imported when it runs."""

import functools
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any, TypeAlias

import click

from engine.cli.bench.goodput import OBJECTIVES, parse_objectives
from engine.cli.debuggable import INTERRUPTED, debuggable
from engine.cli.server_flags import Server, to_server

BACKENDS = ("grpc", "openai", "openai-chat")
OUTPUT = click.Path(dir_okay=False, allow_dash=True)

Decorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]
_FROM_0, _FROM_1 = click.IntRange(0), click.IntRange(1)
_ABOVE_0, _RATIO = click.FloatRange(0, min_open=True), click.FloatRange(0, 1, max_open=True)


class BenchCommand(click.Command):
    """Takes `--goodput ttft:200 tpot:50` as vLLM does: several values after one flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        for n, word in enumerate(args):
            # The first value follows the flag already; an address may come after the last.
            is_next = spread[-2:-1] == ["--goodput"] and args[n - 1] != "--goodput"
            if is_next and word.partition(":")[0] in OBJECTIVES:
                spread.append("--goodput")
            spread.append(word)
        return super().parse_args(ctx, spread)


def _number(name: str, default: float, kind: click.IntRange | click.FloatRange, text: str) -> Decorator:
    return click.option(name, type=kind, default=default, show_default=True, help=text)


@click.command(cls=BenchCommand)
@click.option(
    "--backend", type=click.Choice(BACKENDS), help="What to speak; openai for an http URL, grpc else, if not given."
)
@click.option("--model", help="Model to ask; the server's only or first one if not given.")
@click.option("--num-prompts", type=_FROM_1, help="Requests to send: 100, or all of --trace.")
@_number("--random-input-len", 128, _FROM_0, "Tokens of a prompt after its prefix.")
@_number("--random-output-len", 64, _FROM_1, "Tokens to ask for.")
@_number("--random-range-ratio", 0.0, _RATIO, "Lengths are uniform in [len * (1 - ratio), len * (1 + ratio)].")
@_number("--random-prefix-len", 0, _FROM_0, "Tokens that go before, and are shared.")
@_number("--num-prefixes", 1, _FROM_1, "Different prefixes, drawn for each request.")
@_number("--request-rate", math.inf, _ABOVE_0, "Arrivals per second; inf sends all at once.")
@_number("--burstiness", 1.0, _ABOVE_0, "1: Poisson arrivals; below: bursts; inf: even gaps.")
@click.option("--trace", type=click.File(), help="Arrivals and lengths from a JSONL FILE, in place of random ones.")
@click.option("--max-concurrency", type=_FROM_1, help="Requests under way at one time; others wait.")
@click.option("--goodput", multiple=True, help="Objectives in ms, as ttft:200 tpot:50 e2el:5000.")
@_number("--seed", 0, _FROM_0, "Draws lengths, tokens and arrivals.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's own end, so that outputs are full length.")
@_number("--temperature", 0.0, click.FloatRange(0), "0 is greedy.")
@click.option("--vocab-size", type=_FROM_1, help="Prompt ids are below; the server's if it tells.")
@click.option("--save-result", type=OUTPUT, help="Write numbers as JSON, under vLLM's names; - is stdout.")
@click.option("--html", "--plot", type=OUTPUT, help="Write one HTML file with charts; - is stdout.")
@functools.partial(to_server, positional=True)
@debuggable
def bench(
    backend: str | None, num_prompts: int | None, trace: IO[str] | None, goodput: tuple[str, ...],
    save_result: str | None, html: str | None, server: Server, **flags: Any,
) -> None:  # fmt: skip
    """Load the server at ADDRESS, HOST:PORT of gRPC or an http URL, and measure its answers.

    Requests are sent when they are due, whatever became of the ones before.
    """
    import uvloop
    from rich.console import Console

    from engine.cli.bench.display import print_metrics
    from engine.cli.bench.metrics import make_metrics
    from engine.cli.bench.run import make_backend, make_plan, send, settings_of, write_numbers, write_page

    objectives = parse_objectives(goodput)
    plan = make_plan(trace, num_prompts, flags)
    backend = backend or ("openai" if server.address.startswith(("http://", "https://")) else "grpc")
    client = make_backend(backend, server, flags)
    writers = [(w, path) for w, path in ((write_numbers, save_result), (write_page, html)) if path is not None]
    with ExitStack() as stack:  # opened first: a path that cannot be written should not cost a run
        files = [(w, stack.enter_context(click.open_file(path, "w", encoding="utf-8"))) for w, path in writers]
        run, target = uvloop.run(send(client, plan, flags))
        metrics = make_metrics(run, objectives)
        print_metrics(Console(stderr="-" in (save_result, html)), metrics)
        for write, file in files:
            write(file, run, metrics, settings_of(backend, target, trace, goodput, flags))
    if len(run.answers) < run.planned:
        click.echo(f"engine: interrupted: {len(run.answers)} of {run.planned} requests had ended", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if not metrics.completed:
        raise click.ClickException("no request was completed")
