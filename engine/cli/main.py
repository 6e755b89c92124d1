"""The command line and composition root.

Flags of `engine serve` are derived from the fields of EngineConfig and ServerOptions; `engine/cli/settings.py`
says what environment and file add. Every error is one line on stderr; exit code 2 for usage and
configuration, 1 for failure (`engine/cli/debuggable.py`). Imports that cost time are inside the commands
that need them.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.cli.bench.command import bench
from engine.cli.compile import compile_kernels
from engine.cli.debuggable import INTERRUPTED, USAGE, debuggable
from engine.cli.help_groups import GroupedCommand
from engine.cli.model.command import inspect, models
from engine.cli.profile.command import profile
from engine.cli.sampling_flags import sampling_flags
from engine.cli.server_flags import Server, to_server
from engine.cli.settings import LAYERS, effective_settings, settings_lines, unknown_variables
from engine.config import EngineConfig
from engine.network import host_port
from rpc.options import ServerOptions

if TYPE_CHECKING:
    from rpc.proto.engine.v1 import engine_pb2 as pb


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `engine`; exits the process."""
    _open_standard_streams()
    # grpc's C core logs connection events to stderr, beside our one line; it reads this when imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        code = cli.main(arguments, prog_name="engine", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = USAGE
    except click.ClickException as error:
        click.echo(f"engine: error: {error.format_message()}", err=True)
        code = error.exit_code
    except click.Abort:
        code = INTERRUPTED
    sys.exit(code)


def _open_standard_streams() -> None:
    """Where one was closed (`>&-`) the next socket would take its number, and what is printed would go there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="engine-llm", message="%(version)s")
def cli() -> None:
    """An LLM inference engine, served over gRPC and HTTP."""


@cli.command(cls=GroupedCommand)
@LAYERS.options(ServerOptions)
@LAYERS.options(EngineConfig)
@click.option("--no-http", is_flag=True, help="No HTTP interface; the same as --http-port none.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@debuggable
def serve(log_level: str, no_http: bool, **values: Any) -> None:
    """Serve MODEL, a folder, over gRPC and HTTP until SIGTERM or SIGINT; a second signal stops at once.

    Example:

    \b
    engine serve ./Qwen2.5-0.5B-Instruct --kv-cache-memory-bytes 2GiB
    """
    if no_http:
        values["http_port"] = None
    options = ServerOptions(**{f.name: values.pop(f.name) for f in fields(ServerOptions)})
    config = EngineConfig(**values)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import uvloop

    uvloop.run(_serve(config, options))


async def _serve(config: EngineConfig, options: ServerOptions) -> None:
    from engine.engine import Engine
    from engine.observe.metrics_server import MetricsServer
    from rpc.server import Server

    engine = Engine(config)
    with ExitStack() as stack:
        if options.metrics_port is not None:
            metrics = stack.enter_context(MetricsServer(engine.metrics, options.host, options.metrics_port))
        server = Server(engine, options)
        engine.check_model()
        port = await server.start()
        click.echo(f"listening on {host_port(options.host, port)}")
        if server.http_port is not None:
            scheme = "http" if options.ssl_certfile is None else "https"
            click.echo(f"http on {scheme}://{host_port(options.host, server.http_port)}")
        if options.metrics_port is not None:
            click.echo(f"metrics on http://{host_port(options.host, metrics.port)}/metrics")
        await server.run()


@cli.command()
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message through the chat template.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds until the request is cancelled.")
@to_server
@debuggable
@sampling_flags(max_tokens=256)
def generate(
    prompt: str | None,
    chat: bool,
    timeout: float | None,
    server: Server,
    sampling: "pb.SamplingParams",
) -> None:
    """Stream the answer to PROMPT, or to standard input, from a running server."""
    from rpc import client
    from rpc.proto.engine.v1 import engine_pb2 as pb

    text = sys.stdin.read() if prompt is None else prompt
    request = pb.GenerateRequest(sampling=sampling)
    if chat:
        request.chat.CopyFrom(client.chat([{"role": "user", "content": text}]))
    else:
        request.text = text
    asyncio.run(_generate(server, request, timeout))


async def _generate(server: Server, request: "pb.GenerateRequest", timeout: float | None) -> None:
    async with server.connect() as client:
        async for response in client.generate(request, timeout=timeout):
            for delta in response.deltas:
                click.echo(delta.text, nl=False)
    click.echo()


@cli.command()
@click.option("--system", help="System message to begin with.")
@to_server
@debuggable
@sampling_flags(max_tokens=1024)
def chat(system: str | None, server: Server, sampling: "pb.SamplingParams") -> None:
    """Talk with the model of a running server; /help lists what else can be typed."""
    from engine.cli.chat.session import run_chat

    run_chat(server.connect, sampling, system)


@cli.command()
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=3.0, show_default=True, help="Seconds.")
@to_server
@debuggable
def health(timeout: float, server: Server) -> None:
    """Print the health of a running server; exit code 0 if it serves, else 1. What a container's probe calls."""
    status = asyncio.run(_health(server, timeout))
    click.echo(status)
    if status != "SERVING":
        raise click.exceptions.Exit(1)


async def _health(server: Server, timeout: float) -> str:
    async with server.connect() as client:
        return await client.health(timeout=timeout)


@cli.command(cls=GroupedCommand)
@LAYERS.options(ServerOptions, partial=True)
@LAYERS.options(EngineConfig, partial=True)
@click.option("--json", "as_json", is_flag=True, help="Print an object with value, origin and source of each.")
@debuggable
def config(as_json: bool, **values: Any) -> None:
    """Print the settings that `engine serve` would use, and where each comes from."""
    from rpc.credentials import read_credentials

    read_credentials(ServerOptions(**{f.name: values.pop(f.name) for f in fields(ServerOptions)}))
    EngineConfig(**{"model": "", **values})
    _print_settings(as_json)


def _print_settings(as_json: bool) -> None:
    """Settings on stdout; on stderr, variables that look like settings and are none."""
    settings = list(effective_settings())
    if as_json:
        rows = {s.name: {"value": s.value, "origin": s.origin, "source": s.source or None} for s in settings}
        click.echo(json.dumps(rows, indent=2))
    else:
        for line in settings_lines(settings):
            click.echo(line)
    for variable in unknown_variables(os.environ, LAYERS.known):
        click.echo(f"engine: note: no such setting: {variable}", err=True)


@cli.command("import")
@click.argument("gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@debuggable
def import_(gguf: Path, folder: Path) -> None:
    """Turn the file GGUF into a Hugging Face style checkpoint in DIR."""
    from loader.gguf import import_gguf

    import_gguf(gguf, folder)


@cli.command()
@click.argument("name")
@click.option("--revision", help="Branch, tag or commit; the main branch if not given.")
@debuggable
def pull(name: str, revision: str | None) -> None:
    """Fetch the model NAME, as org/model, from the Hugging Face hub, and print its folder."""
    from loader.hub import fetch

    click.echo(fetch(name, revision))


@cli.command()
@debuggable
def version() -> None:
    """Print the version."""
    click.echo(metadata.version("engine-llm"))


for command in (bench, compile_kernels, inspect, models, profile):
    cli.add_command(command)
