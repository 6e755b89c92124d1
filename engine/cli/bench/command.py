"""The command `engine bench`; `engine/cli/main.py` adds it, and lends it its decorator."""

import functools
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import click
from click.core import ParameterSource

from engine.cli.bench.goodput import OBJECTIVES, parse_objectives
from engine.cli.server_flags import Server, to_server
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.cli.bench.load import Backend, Run, Target
    from engine.cli.bench.metrics import Metrics
    from engine.cli.bench.workload import PlannedRequest

BACKENDS = ("grpc", "openai", "openai-chat")
NUM_PROMPTS = 100
_RANDOM = (
    "random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len", "num_prefixes",
    "request_rate", "burstiness",
)  # fmt: skip
"""Flags of random requests; without `random_`, they are fields of Workload."""
OUTPUT = click.Path(dir_okay=False, allow_dash=True)

Decorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]
Plan: TypeAlias = "Callable[[int], list[PlannedRequest]]"


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


def bench_command(debuggable: Decorator) -> click.Command:
    """The command, with errors handled by `debuggable`."""

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

        objectives = parse_objectives(goodput)
        plan = _plan(trace, num_prompts, flags)
        backend = backend or ("openai" if server.address.startswith(("http://", "https://")) else "grpc")
        client = _backend(backend, server, flags)
        console = Console(stderr="-" in (save_result, html))
        with ExitStack() as stack:  # opened first: a path that cannot be written should not cost a run
            files = [
                None if path is None else stack.enter_context(click.open_file(path, "w", encoding="utf-8"))
                for path in (save_result, html)
            ]
            run, target = uvloop.run(_run(client, plan, flags["vocab_size"], flags["max_concurrency"]))
            metrics = make_metrics(run, objectives)
            print_metrics(console, metrics)
            _write(run, metrics, _settings(backend, target, trace, flags), *files)
        if not metrics.completed:
            raise click.ClickException("no request was completed")

    return bench


def _plan(trace: IO[str] | None, num_prompts: int | None, flags: dict[str, Any]) -> Plan:
    """What makes the requests, given the size of the vocabulary. Raises ConfigError."""
    from engine.cli.bench.recording import read_recording, recorded_requests
    from engine.cli.bench.workload import Workload

    if trace is not None:
        source = click.get_current_context().get_parameter_source
        for name in _RANDOM:
            if source(name) is not ParameterSource.DEFAULT:
                raise ConfigError(f"{name}: cannot be given with trace, which says it")
        arrivals = read_recording(trace, num_prompts)
        return lambda vocab_size: recorded_requests(arrivals, vocab_size, flags["seed"])
    values = {name.removeprefix("random_"): flags[name] for name in _RANDOM}
    return Workload(num_prompts=num_prompts or NUM_PROMPTS, seed=flags["seed"], **values).requests


def _backend(name: str, server: Server, flags: dict[str, Any]) -> "Backend[Any]":
    """The client to send with. Raises ConfigError."""
    sampling = {"temperature": flags["temperature"], "ignore_eos": flags["ignore_eos"]}
    if name == "grpc":
        from engine.cli.bench.grpc_backend import GrpcBackend
        from rpc.proto.engine.v1 import engine_pb2 as pb

        return GrpcBackend(server.connect, flags["model"], pb.SamplingParams(**sampling))
    try:
        from engine.cli.bench.openai import OpenAIBackend
    except ImportError as error:
        raise ConfigError("backend: HTTP needs the extra 'bench': pip install 'engine-llm[bench]'") from error
    return OpenAIBackend(
        server.url, chat=name == "openai-chat", model=flags["model"], sampling=sampling, api_key=server.api_key,
        ssl=server.ssl_context(),
    )  # fmt: skip


async def _run(
    backend: "Backend[Any]", plan: Plan, vocab_size: int | None, max_concurrency: int | None
) -> "tuple[Run, Target]":
    from engine.cli.bench.load import BackendError, run_load

    async with backend:
        try:
            target = await backend.target()
            requests = plan(vocab_size or target.vocab_size)
            longest = max(len(r.prompt) + r.output_len for r in requests)
            if target.max_model_len is not None and longest > target.max_model_len:
                raise ConfigError(
                    f"a request of {longest} tokens, prompt and output, is longer than the model takes, "
                    f"{target.max_model_len}"
                )
            return await run_load(backend, requests, max_concurrency=max_concurrency), target
        except BackendError as error:
            raise click.ClickException(str(error)) from error


def _settings(backend: str, target: "Target", trace: IO[str] | None, flags: dict[str, Any]) -> dict[str, Any]:
    """What the numbers were measured with, for the files; an infinite rate is "inf", as in vLLM's."""
    random = {} if trace is not None else {name: flags[name] for name in _RANDOM}
    finite = {name: "inf" if value == math.inf else value for name, value in random.items()}
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "model_id": target.model,
        "trace": None if trace is None else trace.name,
        **finite,
        **{name: flags[name] for name in ("seed", "max_concurrency", "ignore_eos", "temperature")},
    }


def _write(
    run: "Run", metrics: "Metrics", settings: dict[str, Any], numbers: IO[str] | None, page: IO[str] | None
) -> None:
    if numbers:
        json.dump(settings | {"num_prompts": len(run.answers)} | metrics.as_dict(), numbers, indent=2)
    if page:
        from engine.cli.bench.page import make_page

        page.write(make_page(run, metrics, settings).render())
