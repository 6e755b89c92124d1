"""What gRPC costs: streams of a served engine whose device takes 10 ms a step, over gRPC and in process, in one run.

    python -m perf.grpc_streams [--streams 64 ...] [--tokens 200] [--rounds 3]

Server and engine are in this process, as they are in life; the device computes nothing, so that all CPU time is the
host's. The clients over gRPC are a process of their own, whose CPU time is counted apart; they take messages as
bytes, which costs them least, and read them when the streams have ended. Both ways take turns.

    TPOT          (last - first token) / (tokens - 1) of a stream; the median over all streams of all rounds
    CPU           user and system time of the process, all its threads, for each output token, in microseconds
    tokens/message  more than 1 where several tokens waited for their stream to be read

Recorded in perf/results/grpc_streams.json. Read next: docs/rpc.md, `rpc/servicer.py`.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import grpc
import uvloop

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request.params import SamplingParams
from engine.text.tokenizer import TextTokenizer
from loader.checkpoint import Checkpoint
from loader.demo import demo_checkpoint
from perf.null_device import NullDevice
from perf.record import record
from rpc.client import Client
from rpc.options import ServerOptions
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.server import SERVICE_NAME, Server

PROMPT_TOKENS = 32
STEP_SECONDS = 0.01


class Round(NamedTuple):
    """One way, once.

    Attributes:
        tpots: seconds per output token of every stream.
        reader_cpu: CPU seconds of the clients' process, 0 in process.
    """

    tpots: list[float]
    messages: int
    server_cpu: float = 0.0
    reader_cpu: float = 0.0


@click.command()
@click.option("--streams", multiple=True, type=int, default=(1, 16, 64, 256), show_default=True, help="At once.")
@click.option("--tokens", default=200, show_default=True, help="Tokens of each.")
@click.option("--rounds", default=3, show_default=True, help="Turns of each way, after one to warm up.")
@click.option("--ask", "address", hidden=True, help="Be the clients of this server.")
def main(streams: tuple[int, ...], tokens: int, rounds: int, address: str | None) -> None:
    """Measure both ways and record them."""
    if address is not None:
        print(json.dumps(uvloop.run(ask(address, streams[0], tokens))))
        return
    rows = uvloop.run(measure(demo_checkpoint(), streams, tokens, rounds))
    record("grpc_streams", rows, title=f"Streams of {tokens} tokens, {1000 * STEP_SECONDS:g} ms a step")


async def measure(model: Path, streams: Sequence[int], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each number of streams."""
    config = EngineConfig(
        model=str(model),
        device="cpu",
        max_num_seqs=max(streams),
        max_model_len=PROMPT_TOKENS + tokens,
        max_num_batched_tokens=max(streams) * PROMPT_TOKENS,
        kv_cache_dtype="int8",  # nothing is stored; it halves what the ledger counts, so that all streams fit
    )
    with patch("engine.engine.open_device", open_null_device):
        engine = Engine(config)
        server = Server(engine, ServerOptions(port=0))
        address = f"127.0.0.1:{await server.start()}"
        run = asyncio.create_task(server.run())
        try:
            async with Client(address) as client:
                await client.wait_serving(120)
            return [await row(engine, address, n, tokens, rounds) for n in streams]
        finally:
            server.stop()
            await run


async def open_null_device(config: EngineConfig, checkpoint: Checkpoint, **sizes: int) -> NullDevice:
    """In place of `engine.devices.open_device`."""
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer is not None
    return NullDevice(TextTokenizer(tokenizer), config.max_num_seqs, STEP_SECONDS)


async def row(engine: Engine, address: str, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    ways: dict[str, list[Round]] = {"in process": [], "gRPC": []}
    for turn in range(rounds + 1):
        for way, taken in ways.items():
            before = process_time()
            got = await (
                in_process(engine, streams, tokens) if way == "in process" else outside(address, streams, tokens)
            )
            if turn:
                taken.append(got._replace(server_cpu=process_time() - before))
    tpot = {way: 1e3 * median(t for r in taken for t in r.tpots) for way, taken in ways.items()}
    cpu = {way: 1e6 * fmean(r.server_cpu for r in taken) / (streams * tokens) for way, taken in ways.items()}
    reader_cpu = 1e6 * fmean(r.reader_cpu for r in ways["gRPC"]) / (streams * tokens)
    return {
        "streams": streams,
        "TPOT in process, ms": round(tpot["in process"], 2),
        "TPOT gRPC, ms": round(tpot["gRPC"], 2),
        "ratio": round(tpot["gRPC"] / tpot["in process"], 3),
        "CPU in process": round(cpu["in process"], 1),
        "CPU server": round(cpu["gRPC"], 1),
        "CPU clients": round(reader_cpu, 1),
        "tokens/message": round(streams * tokens / fmean(r.messages for r in ways["gRPC"]), 2),
    }


def prompt(i: int) -> list[int]:
    """Token ids that no other stream has, so that nothing is shared."""
    return [100 + i, *range(1000, 1000 + PROMPT_TOKENS - 1)]


def per_token(arrivals: list[float]) -> float:
    return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)


async def in_process(engine: Engine, streams: int, tokens: int) -> Round:
    taken = await asyncio.gather(*(one_in_process(engine, i, tokens) for i in range(streams)))
    return Round([per_token(arrivals) for arrivals in taken], streams * tokens)


async def one_in_process(engine: Engine, i: int, tokens: int) -> list[float]:
    """When each token arrived."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    arrivals: list[float] = []
    async for delta in engine.generate(prompt(i), params):
        arrivals += [perf_counter()] * len(delta.token_ids)
    return arrivals


async def outside(address: str, streams: int, tokens: int) -> Round:
    """The same by clients in another process."""
    command = [sys.executable, "-m", "perf.grpc_streams", "--ask", address]
    command += ["--streams", str(streams), "--tokens", str(tokens)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise click.ClickException(f"the clients ended with exit code {process.returncode}")
    return Round(**json.loads(out))


async def ask(address: str, streams: int, tokens: int) -> dict[str, Any]:
    """A Round's fields, as the clients see it."""
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        generate: Any = channel.unary_stream(f"/{SERVICE_NAME}/Generate", pb.GenerateRequest.SerializeToString)
        before = process_time()
        taken = await asyncio.gather(*(one_outside(generate, i, tokens) for i in range(streams)))
        cpu = process_time() - before
    tpots = [per_token([at for at, data in messages for _ in range(num_tokens(data))]) for messages in taken]
    return {"tpots": tpots, "messages": sum(map(len, taken)), "reader_cpu": cpu}


async def one_outside(generate: Any, i: int, tokens: int) -> list[tuple[float, bytes]]:
    """When each message arrived."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    call = generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt(i)), sampling=sampling))
    return [(perf_counter(), data) async for data in call]


def num_tokens(data: bytes) -> int:
    return sum(len(d.token_ids) for d in pb.GenerateResponse.FromString(data).deltas)


if __name__ == "__main__":
    main()
