"""`engine bench` as it is called, against a real server over an engine that the test answers for."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme

from engine.errors import OverCapacity
from tests.conftest import Run
from tests.rpc.conftest import Served, Serving
from tests.rpc.fake_engine import Submission

BACKENDS = ("grpc", "openai", "openai-chat")
SMALL = ("--num-prompts", "6", "--random-input-len", "12", "--random-output-len", "5", "--ignore-eos")


@dataclass
class Bench:
    """Runs the command in a thread, while this loop serves it."""

    served: Served
    run: Run
    answered: list[Submission] = field(default_factory=list)
    finish_reason: str = "length"

    def target(self, backend: str) -> tuple[str, ...]:
        http = f"http://127.0.0.1:{self.served.server.http_port}"
        return (f"127.0.0.1:{self.served.port}" if backend == "grpc" else http, "--backend", backend)

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(self.run, "bench", *arguments)

    async def answer(self) -> None:
        """Every request with the tokens it asks for."""
        while True:
            request = await self.served.engine.submissions.get()
            self.answered.append(request)
            assert request.params.max_tokens is not None
            for _ in range(request.params.max_tokens - 1):
                request.push("x", [7])
            request.finish("x", [7], finish_reason=self.finish_reason)


@asynccontextmanager
async def benching(serving: Serving, run: Run, **options: Any) -> AsyncIterator[Bench]:
    async with serving(http_port=0, **options) as served:
        bench = Bench(served, run)
        task = asyncio.create_task(bench.answer())
        try:
            yield bench
        finally:
            task.cancel()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_what_was_sent_is_what_was_asked_for(serving: Serving, run: Run, tmp_path: Path, backend: str) -> None:
    saved, page = tmp_path / "result.json", tmp_path / "result.html"
    async with benching(serving, run) as bench:
        code, out, err = await bench(
            *bench.target(backend), *SMALL, "--random-prefix-len", "4", "--request-rate", "500",
            "--goodput", "ttft:60000", "e2el:60000", "--save-result", str(saved), "--html", str(page),
        )  # fmt: skip
    assert (code, err) == (0, "")
    assert len(bench.answered) == 6
    if backend == "openai-chat":
        prompts = ["".join(map(chr, s.prompt)) for s in bench.answered]
        assert all(p.startswith("<user>") for p in prompts)
        assert len({p[:10] for p in prompts}) == 1
        lengths = [len(s.prompt) for s in bench.answered]
    else:
        assert {len(s.prompt) for s in bench.answered} == {16}
        assert len({tuple(s.prompt[:4]) for s in bench.answered}) == 1
        lengths = [16] * 6
    assert {(s.params.max_tokens, s.params.ignore_eos, s.params.temperature) for s in bench.answered} == {(5, True, 0)}
    result = json.loads(saved.read_text())
    assert (result["backend"], result["model_id"], result["num_prompts"]) == (backend, "tiny", 6)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
    assert result["total_input_tokens"] == sum(lengths)
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"]
    assert f"{result['output_throughput']:.2f}" in out and "goodput" in out
    assert "Load on tiny" in page.read_text()


async def test_an_address_may_follow_the_objectives(serving: Serving, run: Run) -> None:
    async with benching(serving, run) as bench:
        code, out, err = await bench(*SMALL, "--goodput", "ttft:60000", "tpot:60000", f"localhost:{bench.served.port}")
    assert (code, err) == (0, "") and "goodput" in out


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_servers_key(serving: Serving, run: Run, tmp_path: Path, backend: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("token-a acme")
    async with benching(serving, run, api_key_file=str(keys)) as bench:
        code, _, err = await bench(*bench.target(backend), *SMALL)
        assert (code, err.count("\n")) == (1, 1) and not bench.answered
        code, _, err = await bench(*bench.target(backend), *SMALL, "--api-key", "token-a")
    assert (code, err, len(bench.answered)) == (0, "", 6)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_tls(serving: Serving, run: Run, tmp_path: Path, backend: str) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key, trusted = (tmp_path / name for name in ("cert", "key", "ca"))
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(trusted)
    async with benching(serving, run, wait=False, ssl_certfile=str(cert), ssl_keyfile=str(key)) as bench:
        address, *rest = bench.target(backend)
        code, _, err = await bench(address.replace("http:", "https:"), *rest, *SMALL, "--ssl-ca-certs", str(trusted))
    assert (code, err, len(bench.answered)) == (0, "", 6)


def test_without_aiohttp_http_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "engine.cli.bench.openai", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    code, out, err = run("bench", "http://127.0.0.1:1")
    assert (code, out, err.count("\n")) == (2, "", 1) and "engine-llm[bench]" in err


async def test_a_recorded_trace(serving: Serving, run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"seconds": 7, "input_len": 9, "output_len": 2, "prefix_id": "a", "prefix_len": 8}\n'
        '{"seconds": 7, "input_len": 8, "output_len": 3, "prefix_id": "a", "prefix_len": 8}\n'
    )
    async with benching(serving, run) as bench:
        code, _, err = await bench(*bench.target("grpc"), "--trace", str(trace))
    assert (code, err) == (0, "")
    assert sorted((len(s.prompt), s.params.max_tokens) for s in bench.answered) == [(8, 3), (9, 2)]
    assert len({tuple(s.prompt[:8]) for s in bench.answered}) == 1


async def test_json_to_stdout_is_alone_there(serving: Serving, run: Run) -> None:
    async with benching(serving, run) as bench:
        code, out, err = await bench(*bench.target("grpc"), *SMALL, "--save-result", "-", "--max-concurrency", "1")
    assert code == 0 and "requests completed" in err
    assert json.loads(out)["max_concurrent_requests"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
async def test_refused_requests_are_counted_and_named(serving: Serving, run: Run, backend: str) -> None:
    async with benching(serving, run) as bench:
        bench.served.engine.refusal = OverCapacity("the queue is full")
        code, out, err = await bench(*bench.target(backend), *SMALL)
    assert (code, err) == (1, "engine: error: no request was completed\n")
    assert "6 failed: " in out and "the queue is full" in out


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_answer_that_ends_early_has_failed(serving: Serving, run: Run, backend: str) -> None:
    async with benching(serving, run) as bench:
        bench.finish_reason = "abort"
        code, out, _ = await bench(*bench.target(backend), *SMALL)
    assert code == 1 and "6 failed: the answer ended early: abort" in out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--model", "other"], 1, "'other' is not served there"),
        (["--random-input-len", "3000"], 2, "2048"),
    ],
)
async def test_what_the_server_cannot_take_is_one_line(
    serving: Serving, run: Run, backend: str, arguments: list[str], code: int, says: str
) -> None:
    async with benching(serving, run) as bench:
        got, out, err = await bench(*bench.target(backend), *SMALL, *arguments)
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("engine: error: ") and says in err and not bench.answered


@pytest.mark.parametrize("address", ["127.0.0.1:1", "http://127.0.0.1:1"])
def test_no_server_is_one_line(run: Run, address: str) -> None:
    code, out, err = run("bench", address)
    assert (code, out, err.count("\n")) == (1, "", 1) and err.startswith("engine: error: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--backend", "smoke"], "--backend"),
        (["--request-rate", "0"], "--request-rate"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--goodput", "ttft:200", "tpot:fast"], "goodput: 'tpot:fast'"),
        (["--trace", "/no/such/trace"], "/no/such/trace"),
        (["--trace", __file__, "--request-rate", "5"], "request_rate: cannot be given with trace"),
        (["--trace", __file__], "trace: line 1 is not JSON"),
        (["--ssl-keyfile", "k"], "ssl_keyfile"),
    ],
)
def test_bad_usage_is_one_line(run: Run, arguments: list[str], says: str) -> None:
    code, out, err = run("bench", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("engine: error: ") and says in err


def test_a_path_that_cannot_be_written_is_found_before_the_run(run: Run) -> None:
    assert run("bench", "127.0.0.1:1", "--html", "/no/such/folder/page.html") == (
        1, "", "engine: error: [Errno 2] No such file or directory: '/no/such/folder/page.html'\n"
    )  # fmt: skip


async def test_a_grpc_port_is_no_http_server(serving: Serving, run: Run) -> None:
    async with benching(serving, run) as bench:
        code, _, err = await bench(f"http://127.0.0.1:{bench.served.port}", *SMALL)
    assert code == 1 and "what answers may not speak HTTP: is it the gRPC port?" in err
