"""A real engine on a tiny golden checkpoint: in this process, or as `engine serve` in one of its own."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers

from engine.config import EngineConfig
from rpc.client import Client
from tests.conftest import GOLDEN

ROOT = Path(__file__).parents[2]
CHECKPOINT = GOLDEN / "llama-bias"
LONGEST = 8192


def word(token_id: int) -> str:
    """The text of an id."""
    return f"word-number-{token_id}"


def make_checkpoint(folder: Path) -> Path:
    """The golden weights, allowed longer sequences, with a tokenizer of one `word` per id."""
    for name in ("model.safetensors", "generation_config.json"):
        (folder / name).symlink_to(CHECKPOINT / name)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config["max_position_embeddings"] = LONGEST
    (folder / "config.json").write_text(json.dumps(config))
    words = {word(i): i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def engine_config(model: Path, **more: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 96 << 20,
    }  # fmt: skip
    return EngineConfig(model=str(model), **settings | more)


@contextmanager
def server_process(model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`engine serve` and its address; killed at the end if it still runs."""
    command = [
        sys.executable, "-m", "engine", "serve", str(model), "--port", "0", "--device", "cpu", "--dtype", "float32",
        "--cpu-threads", "1", "--kv-cache-memory-bytes", "96MiB", *flags,
        *(() if "--http-port" in flags else ("--no-http",)),
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("listening on ").strip()
        assert address, process.communicate()[1]
        yield process, address
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


class Addresses(NamedTuple):
    """Where a server listens."""

    grpc: str
    http: str


@contextmanager
def http_server_process(model: Path, *flags: str) -> Iterator[Addresses]:
    """One that serves HTTP, too, and answers requests."""
    with server_process(model, "--http-port", "0", *flags) as (process, address):
        assert process.stdout is not None
        http = process.stdout.readline().removeprefix("http on ").strip()

        async def wait() -> None:
            async with Client(address) as client:
                await client.wait_serving(60)

        asyncio.run(wait())
        yield Addresses(address, http)


def children_of(pid: int) -> list[int]:
    """Process ids, from /proc."""
    return [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]
