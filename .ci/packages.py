"""Builds the sdist, and of it the wheel; runs tests in the one, installs the other and has it stream one answer.

The checkpoint is a config.json of a tiny Llama with random weights, prompted with token ids.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TESTS = ("test_deploy.py", "test_rooms.py", "kv", "observe/test_dashboards.py", "loader")
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

ASK = """
import asyncio, sys
import engine, rpc
from rpc.client import Client
from rpc.proto.engine.v1 import engine_pb2 as pb

async def ask(address):
    prompt = pb.TokenIds(ids=[3, 4, 5])
    sampling = pb.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async with Client(address) as client:
        await client.wait_serving(120)
        call = client.generate(pb.GenerateRequest(token_ids=prompt, sampling=sampling, include_usage=True))
        ids = [i async for r in call for d in r.deltas for i in d.token_ids]
    assert len(ids) == 8 and all(0 <= i < 128 for i in ids), ids
    print("streamed", ids, "by", engine.__file__)

asyncio.run(ask(sys.argv[1]))
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Run to success, not seeing the checkout."""
    subprocess.run([str(part) for part in command], cwd=cwd, check=True, env=_environment())


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def build(dist: Path) -> None:
    """The sdist, and the wheel out of it."""
    uv = shutil.which("uv")
    if uv:
        run(uv, "build", "--quiet", "--out-dir", dist, ROOT, cwd=dist)
    else:
        run(sys.executable, "-m", "build", "--outdir", dist, ROOT, cwd=dist)


def run_tests_of_sdist(dist: Path, folder: Path) -> None:
    """Those that read what lies beside the packages, and some that don't."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    tests = [f"tests/{name}" for name in TESTS]
    run(sys.executable, "-m", "pytest", "-q", *tests, cwd=folder / sdist.name.removesuffix(".tar.gz"))


def make_environment(dist: Path, folder: Path) -> Path:
    """A fresh environment with the wheel and what the cpu device needs; returns its python."""
    uv = shutil.which("uv")
    env = folder / "env"
    python = env / "bin" / "python"
    if uv:
        run(uv, "venv", "--quiet", "--python", sys.executable, env, cwd=folder)
        install: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", python]
    else:
        venv.create(env, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet"]
    (wheel,) = dist.glob("*.whl")
    run(*install, f"{wheel}[cpu]", cwd=folder)
    return python


def stream_once(python: Path, folder: Path) -> None:
    """Serve the tiny model and ask it; the server must then stop cleanly."""
    model = folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    command = [python.with_name("engine"), "serve", model, "--load-format", "dummy", "--port", "0"]
    flags = ["--kv-cache-memory-bytes", str(16 << 20)]
    server = subprocess.Popen(
        [*map(str, command), *flags], cwd=folder, text=True, stdout=subprocess.PIPE, env=_environment()
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip().removeprefix("listening on ")
        if not address:
            sys.exit("the server ended before it listened")
        run(python, "-c", ASK, address, cwd=folder)
        server.terminate()
        if server.wait(60) != 0:
            sys.exit(f"the server ended with exit code {server.returncode}")
    finally:
        server.kill()
        server.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, dist = Path(name), Path(name) / "dist"
        dist.mkdir()
        build(dist)
        run_tests_of_sdist(dist, folder)
        stream_once(make_environment(dist, folder), folder)


if __name__ == "__main__":
    main()
