"""What gRPC costs a stream: time per output token of concurrent streams, over gRPC and in process, in one run.

    python -m perf.grpc_streams [--model DIR] [--streams 16] [--tokens 128] [--rounds 3]

One engine serves both, in this process, in turns. The clients over gRPC are a process of their own, as they
are in life. Time per output token is (last - first token) / (tokens - 1), the median over all streams of
all rounds. Recorded in perf/results/grpc_streams.json. Read next: docs/rpc.md.
"""

import asyncio
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import uvloop

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import SamplingParams
from loader.demo import demo_checkpoint
from perf.record import record
from rpc.client import Client
from rpc.options import ServerOptions
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.server import Server

PROMPT_TOKENS = 32


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint; the demo model if unset.")
@click.option("--streams", default=16, show_default=True, help="Streams at once.")
@click.option("--tokens", default=128, show_default=True, help="Tokens of each.")
@click.option("--rounds", default=3, show_default=True, help="Turns of each kind, after one to warm up.")
@click.option("--ask", "address", hidden=True, help="Be the clients of this server.")
def main(model: Path | None, streams: int, tokens: int, rounds: int, address: str | None) -> None:
    """Measure both ways and record the ratio."""
    if address is not None:
        print(json.dumps(uvloop.run(ask(address, streams, tokens))))
        return
    model = model or demo_checkpoint()
    times = uvloop.run(measure(model, streams, tokens, rounds))
    medians = {way: median(values) for way, values in times.items()}
    row = {
        "streams": streams,
        "tokens": tokens,
        "in process, ms": round(medians["in_process"] * 1000, 3),
        "gRPC, ms": round(medians["grpc"] * 1000, 3),
        "ratio": round(medians["grpc"] / medians["in_process"], 4),
    }
    record("grpc_streams", [row], title=f"{model.resolve().name}: time per output token, gRPC over in process")


async def measure(model: Path, streams: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per output token of every stream, by way."""
    times: dict[str, list[float]] = {"in_process": [], "grpc": []}
    engine = Engine(EngineConfig(model=str(model), max_num_seqs=max(streams, 16), max_model_len=PROMPT_TOKENS + tokens))
    server = Server(engine, ServerOptions(port=0))
    port = await server.start()
    run = asyncio.create_task(server.run())
    try:
        async with Client(f"127.0.0.1:{port}") as client:
            await client.wait_serving(120)
        for turn in range(rounds + 1):
            in_process = await asyncio.gather(*(one_in_process(engine, i, tokens) for i in range(streams)))
            over_grpc = await ask_from_outside(f"127.0.0.1:{port}", streams, tokens)
            if turn:
                times["in_process"] += in_process
                times["grpc"] += over_grpc
    finally:
        server.stop()
        await run
    return times


def prompt(i: int) -> list[int]:
    """Token ids that no other stream has, so that nothing is shared."""
    return [100 + i, *range(1000, 1000 + PROMPT_TOKENS - 1)]


def per_token(arrivals: list[float]) -> float:
    return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)


async def one_in_process(engine: Engine, i: int, tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    arrivals: list[float] = []
    async for delta in engine.generate(prompt(i), params):
        arrivals += [perf_counter()] * len(delta.token_ids)
    return per_token(arrivals)


async def ask_from_outside(address: str, streams: int, tokens: int) -> list[float]:
    """The same by clients in another process."""
    command = [sys.executable, "-m", "perf.grpc_streams", "--ask", address]
    command += ["--streams", str(streams), "--tokens", str(tokens)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise click.ClickException(f"the clients ended with exit code {process.returncode}")
    times: list[float] = json.loads(out)
    return times


async def ask(address: str, streams: int, tokens: int) -> list[float]:
    """Seconds per output token of each stream."""
    async with Client(address) as client:
        return await asyncio.gather(*(one_over_grpc(client, i, tokens) for i in range(streams)))


async def one_over_grpc(client: Client, i: int, tokens: int) -> float:
    sampling = pb.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt(i)), sampling=sampling)
    arrivals: list[float] = []
    async for response in client.generate(request):
        arrivals += [perf_counter()] * sum(len(d.token_ids) for d in response.deltas)
    return per_token(arrivals)


if __name__ == "__main__":
    main()
