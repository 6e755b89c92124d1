"""`make run`: the demo model behind a real server, one chat answer streamed over gRPC, and its speed.

`--serve` becomes the server instead, until a signal ends it.
Read next: `loader/demo.py` (where the model comes from), `rpc/client.py`.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import click
import grpc

from loader.demo import demo_checkpoint
from loader.errors import CheckpointError
from rpc.client import Client, chat, describe
from rpc.proto.engine.v1 import engine_pb2 as pb

QUESTION = "What is gravity?"
START_SECONDS = 120.0


@click.command()
@click.argument("question", default=QUESTION)
@click.option("--serve", is_flag=True, help="Serve until a signal, ask nothing.")
@click.option("--port", default=50051, show_default=True, help="Port of --serve.")
@click.option("--http-port", default=8000, show_default=True, help="Port of the HTTP interface of --serve.")
@click.option("--max-tokens", default=128, show_default=True, help="Longest answer.")
def main(question: str, serve: bool, port: int, http_port: int, max_tokens: int) -> None:
    """Stream the demo model's answer to QUESTION."""
    try:
        model = demo_checkpoint()
        if serve:
            command = [*serve_command(model, port)[:-1], "--http-port", str(http_port)]
            os.execv(command[0], command)
        asyncio.run(run(model, question, max_tokens))
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error
    except (CheckpointError, OSError) as error:
        raise click.ClickException(str(error)) from error


def serve_command(model: Path, port: int) -> list[str]:
    """`engine serve` as this Python runs it."""
    return [sys.executable, "-m", "engine", "serve", str(model), "--port", str(port), "--no-http"]


async def run(model: Path, question: str, max_tokens: int) -> None:
    """Serve `model` on a free port, ask it once, stop it."""
    started = perf_counter()
    async with running_server(serve_command(model, 0)) as address, Client(address) as client:
        click.secho(f"Serving on {address} after {perf_counter() - started:.1f} s", dim=True)
        click.secho(f"\n> {question}\n", bold=True)
        await stream_answer(client, question, max_tokens)


@asynccontextmanager
async def running_server(command: list[str]) -> AsyncIterator[str]:
    """A server process that is SERVING, as its address; it always ends with the block.

    Raises OSError when it ends by itself or takes longer than START_SECONDS.
    """
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        address = (await server.stdout.readline()).decode().strip().removeprefix("listening on ")
        if not address:
            raise OSError(f"the server ended with exit code {await server.wait()} before it listened")
        await _until_serving(server, address)
        yield address
    finally:
        if server.returncode is None:
            server.terminate()
        await server.wait()


async def _until_serving(server: asyncio.subprocess.Process, address: str) -> None:
    try:
        async with Client(address) as client:
            await client.wait_serving(START_SECONDS)
    except grpc.aio.AioRpcError as error:  # it was listening, so it is gone
        raise OSError(f"the server ended with exit code {await server.wait()} before it served") from error
    except TimeoutError as error:
        raise OSError(f"the server did not serve within {START_SECONDS:g} s") from error


async def stream_answer(client: Client, question: str, max_tokens: int) -> None:
    """Print the answer as it arrives, then time to first token, time per output token and tokens/s."""
    request = pb.GenerateRequest(
        chat=chat([{"role": "user", "content": question}]),
        sampling=pb.SamplingParams(temperature=0, max_tokens=max_tokens),
        include_usage=True,
    )
    asked = perf_counter()
    arrivals: list[tuple[float, int]] = []
    usage = pb.Usage()
    async for response in client.generate(request):
        for delta in response.deltas:
            click.echo(delta.text, nl=False)
            if delta.token_ids:
                arrivals.append((perf_counter(), len(delta.token_ids)))
        usage.MergeFrom(response.usage)
    click.echo("\n")
    if not arrivals:
        raise OSError("the server sent no token")
    (first, first_tokens), (last, _) = arrivals[0], arrivals[-1]
    tokens = usage.completion_tokens
    per_token = (last - first) / max(1, tokens - first_tokens)
    click.echo(f"{usage.prompt_tokens} prompt tokens, {tokens} output tokens")
    click.echo(f"TTFT      {1e3 * (first - asked):8.1f} ms")
    click.echo(f"TPOT      {1e3 * per_token:8.1f} ms")
    click.echo(f"tokens/s  {tokens / (last - asked):8.1f}")


if __name__ == "__main__":
    main()
