"""Command line tools that other people wrote, against `engine serve`: grpcurl, k6, vLLM's benchmark.

`.ci/tools.sh` brings them; a test whose tool is missing is skipped.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loader.cache import cache_dir
from tests.clients.conftest import GOLDEN_FILE, MODEL, Addresses

BIN = Path(sys.executable).parent
GRPCURL = shutil.which("grpcurl", path=BIN) or shutil.which("grpcurl")
K6 = shutil.which("k6", path=BIN) or shutil.which("k6")
VLLM = shutil.which("vllm-rs", path=cache_dir() / "tools") or shutil.which("vllm-rs")


def ran(*command: str | Path | None) -> str:
    """Standard output of a command that has to succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def json_values(text: str) -> list[dict[str, Any]]:
    """Objects that follow each other."""
    values, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values


@pytest.mark.skipif(GRPCURL is None, reason="no grpcurl: .ci/tools.sh")
class TestGrpcurl:
    def test_reflection_lists_the_services(self, demo_server: Addresses) -> None:
        services = ran(GRPCURL, "-plaintext", demo_server.grpc, "list").split()
        assert {"engine.v1.Engine", "grpc.health.v1.Health", "vllm.grpc.engine.VllmEngine"} <= set(services)
        methods = ran(GRPCURL, "-plaintext", demo_server.grpc, "list", "engine.v1.Engine").split()
        assert "engine.v1.Engine.Generate" in methods

    def test_it_streams_the_golden_answer(self, demo_server: Addresses) -> None:
        request = {
            "tokenIds": {"ids": GOLDEN_FILE["prompt_0"].tolist()},
            "sampling": {"temperature": 0, "maxTokens": 24},
            "includeUsage": True,
        }
        answer = json_values(
            ran(GRPCURL, "-plaintext", "-d", json.dumps(request), demo_server.grpc, "engine.v1.Engine/Generate")
        )
        ids = [i for message in answer for delta in message["deltas"] for i in delta.get("token_ids", ())]
        assert ids == GOLDEN_FILE["greedy_0"][:24].tolist()
        assert len(answer) > 1 and answer[-1]["usage"]["completion_tokens"] == 24


@pytest.mark.skipif(K6 is None, reason="no k6: .ci/tools.sh")
def test_k6_meets_its_thresholds(demo_server: Addresses, tmp_path: Path) -> None:
    script, summary = Path(__file__).with_name("completions.js"), tmp_path / "summary.json"
    ran(
        K6, "run", "--quiet", "--no-usage-report", "--address", "", "--summary-export", summary,
        "--env", f"URL={demo_server.http}", script,
    )  # fmt: skip
    metrics = json.loads(summary.read_text())["metrics"]
    assert metrics["http_reqs"]["count"] == 20 and metrics["checks"]["passes"] == 20


@pytest.mark.skipif(VLLM is None, reason="no vllm-rs: .ci/tools.sh")
@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve(demo_server: Addresses, smollm2: Path, tmp_path: Path, backend: str, endpoint: str) -> None:
    ran(
        VLLM, "bench", "serve", "--backend", backend, "--endpoint", endpoint, "--base-url", demo_server.http,
        "--model", MODEL, "--tokenizer", smollm2, "--dataset-name", "random", "--random-input-len", "64",
        "--random-output-len", "16", "--num-prompts", "8", "--max-concurrency", "4", "--seed", "0", "--ignore-eos",
        "--temperature", "0", "--disable-tqdm", "--ready-check-timeout-sec", "10", "--save-result",
        "--result-dir", tmp_path, "--result-filename", "result.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (8, 0, 8 * 16)
    assert result["mean_ttft_ms"] > 0 and result["mean_tpot_ms"] > 0
