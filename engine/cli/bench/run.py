"""A load sent, measured, printed and written. Read next: `engine/cli/bench/load.py`, `engine/cli/bench/metrics.py`."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any, TypeAlias

import click
from click.core import ParameterSource

from engine.cli.bench.grpc_backend import GrpcBackend
from engine.cli.bench.load import Backend, BackendError, Run, Target, run_load
from engine.cli.bench.metrics import Metrics
from engine.cli.bench.page import make_page
from engine.cli.bench.recording import read_recording, recorded_requests
from engine.cli.bench.workload import PlannedRequest, Workload
from engine.cli.server_flags import Server
from engine.errors import ConfigError
from loader.progress import LINE_SECONDS
from rpc.proto.engine.v1 import engine_pb2 as pb

NUM_PROMPTS = 100
RANDOM = (
    "random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len", "num_prefixes",
    "request_rate", "burstiness",
)  # fmt: skip
"""Flags of random requests; without `random_`, they are fields of Workload."""

Plan: TypeAlias = Callable[[int], list[PlannedRequest]]
"""Makes the requests, given the size of the vocabulary."""


def make_plan(trace: IO[str] | None, num_prompts: int | None, flags: dict[str, Any]) -> Plan:
    """Of recorded requests or of random ones. Raises ConfigError."""
    if trace is not None:
        source = click.get_current_context().get_parameter_source
        for name in RANDOM:
            if source(name) is not ParameterSource.DEFAULT:
                raise ConfigError(f"{name}: cannot be given with trace, which says it")
        arrivals = read_recording(trace, num_prompts)
        return lambda vocab_size: recorded_requests(arrivals, vocab_size, flags["seed"])
    values = {name.removeprefix("random_"): flags[name] for name in RANDOM}
    return Workload(num_prompts=num_prompts or NUM_PROMPTS, seed=flags["seed"], **values).requests


def make_backend(name: str, server: Server, flags: dict[str, Any]) -> Backend[Any]:
    """The client to send with. Raises ConfigError."""
    sampling = {"temperature": flags["temperature"], "ignore_eos": flags["ignore_eos"]}
    if name == "grpc":
        return GrpcBackend(server.connect, flags["model"], pb.SamplingParams(**sampling))
    try:
        from engine.cli.bench.openai import OpenAIBackend
    except ImportError as error:
        raise ConfigError("backend: HTTP needs the extra 'bench': pip install 'engine-llm[bench]'") from error
    return OpenAIBackend(
        server.url, chat=name == "openai-chat", model=flags["model"], sampling=sampling, api_key=server.api_key,
        ssl=server.ssl_context(),
    )  # fmt: skip


async def send(backend: Backend[Any], plan: Plan, flags: dict[str, Any]) -> tuple[Run, Target]:
    """Send what is planned. Raises ConfigError, and ClickException for a server that cannot be measured."""
    async with backend:
        try:
            target = await backend.target()
            requests = plan(flags["vocab_size"] or target.vocab_size)
            longest = max(len(r.prompt) + r.output_len for r in requests)
            if target.max_model_len is not None and longest > target.max_model_len:
                raise ConfigError(
                    f"a request of {longest} tokens, prompt and output, is longer than the model takes, "
                    f"{target.max_model_len}"
                )
            with request_progress(len(requests)) as ended:
                return await run_load(backend, requests, max_concurrency=flags["max_concurrency"], ended=ended), target
        except BackendError as error:
            raise click.ClickException(str(error)) from error


@contextmanager
def request_progress(total: int, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[], None]]:
    """Yields what to call as each request has ended: a bar on a terminal's stderr, elsewhere a line now and then."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("", total=total)
            yield lambda: progress.advance(bar)
        return
    count, told = 0, clock()

    def ended() -> None:
        nonlocal count, told
        count += 1
        if clock() - told >= LINE_SECONDS:
            told = clock()
            print(f"bench: {count} of {total} requests have ended", file=sys.stderr, flush=True)

    yield ended


def settings_of(
    backend: str, target: Target, trace: IO[str] | None, goodput: Sequence[str], flags: dict[str, Any]
) -> dict[str, Any]:
    """What the numbers were measured with, for the files; an infinite rate is "inf", as in vLLM's."""
    random = {} if trace is not None else {name: flags[name] for name in RANDOM}
    finite = {name: "inf" if value == math.inf else value for name, value in random.items()}
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "model_id": target.model,
        **target.facts,
        "goodput": " ".join(goodput) or None,
        "trace": None if trace is None else trace.name,
        **finite,
        **{name: flags[name] for name in ("seed", "max_concurrency", "ignore_eos", "temperature")},
    }


def write_numbers(file: IO[str], run: Run, metrics: Metrics, settings: dict[str, Any]) -> None:
    """As JSON, under vLLM's names."""
    json.dump(settings | {"num_prompts": len(run.answers)} | metrics.as_dict(), file, indent=2)


def write_page(file: IO[str], run: Run, metrics: Metrics, settings: dict[str, Any]) -> None:
    """As HTML."""
    file.write(make_page(run, metrics, settings).render())
