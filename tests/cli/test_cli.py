"""The command line: flags, exit codes, one line per error; and `serve` and `generate` as processes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest

from engine.cli import main as cli
from engine.cli.help_groups import GROUPS
from engine.config import EngineConfig
from loader.errors import CheckpointError
from rpc.options import ServerOptions
from tests.cli.conftest import Started
from tests.conftest import Run

ROOT = Path(__file__).parents[2]


def test_version(run: Run) -> None:
    assert run("version") == (0, metadata.version("engine-llm") + "\n", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve"], "MODEL"),
        (["serve", "a", "--model", "b"], "MODEL"),
        (["serve", "a", "--port", "70000"], "--port"),
        (["serve", "a", "--grace", "-1"], "--grace"),
        (["serve", "a", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["serve", "a", "--max-num-batched-tokens", "many"], "--max-num-batched-tokens"),
        (["serve", "a", "--max-num-batched-tokens", "3"], "max_num_batched_tokens"),
        (["serve", "a", "--dtype", "float8"], "--dtype"),
        (["serve", "a", "--bogus"], "--bogus"),
        (["serve", "a", "--stream-interval", "0"], "--stream-interval"),
        (["serve", "a", "--ssl-cert-reqs", "1"], "ssl_cert_reqs"),
        (["serve", "a", "--ssl-keyfile", "k", "--port", "0"], "ssl_keyfile"),
        (["serve", "a", "--api-key-file", "/no/such/keys", "--port", "0"], "/no/such/keys"),
        (["serve", "a", "--port", "7777", "--metrics-port", "7777"], "metrics_port"),
        (["generate", "x", "--ssl-keyfile", "k"], "ssl_keyfile"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--timeout", "0"], "--timeout"),
        (["generate", "x", "--max-tokens", "-1"], "max_tokens"),
        (["generate", "x", "--json-schema", "nothing-there.json"], "--json-schema"),
        (["generate", "x", "--regex", "a", "--choice", "b"], "structured_outputs: give exactly one"),
        (["import", "/no/such.gguf", "dir"], "/no/such.gguf"),
        (["no-such-command"], "no-such-command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_usage_error_is_one_line_that_names_it_and_exit_code_2(run: Run, arguments: list[str], says: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("engine: error: ") and says in err


def test_no_command_shows_the_help_and_fails(run: Run) -> None:
    code, out, err = run()
    assert (code, out) == (2, "")
    assert "serve" in err and "generate" in err


def test_serve_without_flags_takes_every_default(run: Run, started: Started) -> None:
    assert run("serve", "/m")[0] == 0
    assert run("serve", "--model", "/m")[0] == 0
    assert started == [(EngineConfig(model="/m"), ServerOptions())] * 2


def test_every_setting_has_a_flag(run: Run) -> None:
    _, out, _ = run("serve", "--help")
    for f in (*fields(EngineConfig), *fields(ServerOptions)):
        assert f"--{f.name.replace('_', '-')}" in out


def test_flags_reach_the_config(run: Run, started: Started) -> None:
    code, _, err = run(
        *("serve", "/m", "--served-model-name", "tiny", "--device", "cpu", "--dtype", "float32"),
        *("--load-format", "dummy", "--max-model-len", "128", "--max-num-seqs", "2", "--max-num-batched-tokens", "8"),
        *("--block-size", "4", "--kv-cache-memory-bytes", "1000", "--no-enable-prefix-caching"),
        *("--enable-chunked-prefill", "--seed", "7", "--cpu-threads", "1", "--max-queued-requests", "5"),
        *("--max-logprobs", "3", "--host", "::1", "--port", "0", "--grace", "0.5", "--max-message-bytes", "4096"),
    )
    assert (code, err) == (0, "")
    config = EngineConfig(
        model="/m", served_model_name="tiny", device="cpu", dtype="float32", load_format="dummy", max_model_len=128,
        max_num_seqs=2, max_num_batched_tokens=8, block_size=4, kv_cache_memory_bytes=1000,
        enable_prefix_caching=False, enable_chunked_prefill=True, seed=7, cpu_threads=1, max_queued_requests=5,
        max_logprobs=3,
    )  # fmt: skip
    assert started == [(config, ServerOptions(host="::1", port=0, grace=0.5, max_message_bytes=4096))]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CheckpointError("/m", ["no config.json"]), "engine: error: /m: no config.json\n"),
        (FileNotFoundError(2, "No such file", "/m"), "engine: error: [Errno 2] No such file: '/m'\n"),
        (KeyError("x"), "engine: error: KeyError: 'x' (--debug shows where)\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_is_one_line_and_exit_code_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    async def fail(config: EngineConfig, options: ServerOptions) -> None:
        raise error

    monkeypatch.setattr(cli, "_serve", fail)
    assert run("serve", "/m") == (1, "", line)
    code, _, err = run("serve", "/m", "--debug")
    assert code == 1
    assert err.startswith("Traceback") and err.endswith(line)


@pytest.mark.parametrize("command", [["generate", "x"], ["health"]], ids=lambda command: command[0])
def test_no_server_is_a_failure_in_one_line(run: Run, command: list[str]) -> None:
    code, out, err = run(*command, "--address", "127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.startswith("engine: error: UNAVAILABLE: ") and err.count("\n") == 1


def test_version_imports_nothing_heavy() -> None:
    program = (
        "import engine.cli.main, sys; print({'grpc', 'numpy', 'tokenizers', 'jinja2', 'uvloop'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "set()\n"


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`engine ARGUMENTS` over an engine that echoes, in a process of its own; always ended."""
    command = [sys.executable, "-m", "tests.rpc.serve_fake", *arguments]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A serving process and its address, which it printed."""
    with process("serve", "/m", "--port", "0", "--no-http", *arguments) as child:
        word, _, address = child.stdout.readline().strip().rpartition(" ")
        assert word == "listening on"
        while "serving" not in (line := child.stderr.readline()):
            assert line, "the server ended"
        yield child, address


def engine(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "engine", *arguments],
        cwd=ROOT, input=stdin, text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_serve_and_generate_as_processes() -> None:
    with server() as (child, address):
        assert engine("generate", "hé", "--address", address) == (0, "hé\n", "")
        assert engine("generate", "--address", address, stdin="from stdin") == (0, "from stdin\n", "")
        assert engine("generate", "--chat", "q", "--address", address) == (0, "user>q<assistant>\n", "")
        assert engine("health", "--address", address) == (0, "SERVING\n", "")
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0


def test_loopback_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:9")
    with server() as (_, address):
        assert engine("health", "--address", address) == (0, "SERVING\n", "")
        port = address.rpartition(":")[2]
        assert engine("generate", "hé", "--address", f"localhost:{port}") == (0, "hé\n", "")


def test_addresses_of_ipv6_are_printed_in_brackets() -> None:
    with process("serve", "/m", "--host", "::1", "--port", "0", "--http-port", "0", "--metrics-port", "0") as child:
        assert child.stdout is not None
        grpc, http, metrics = (child.stdout.readline().strip() for _ in range(3))
        assert grpc.startswith("listening on [::1]:")
        while "serving" not in (line := child.stderr.readline()):
            assert line, "the server ended"
        http_address = http.removeprefix("http on ")
        ours = f"tiny in bfloat16 on cpu: test: gRPC {grpc.split()[-1]}, OpenAI API and page {http_address}/"
        assert line.strip().endswith(f"serving {ours}")
        assert http.startswith("http on http://[::1]:")
        assert metrics.startswith("metrics on http://[::1]:") and metrics.endswith("/metrics")
        address = grpc.removeprefix("listening on ")
        assert engine("generate", "hi", "--address", address) == (0, "hi\n", "")


def test_a_reader_that_has_enough_ends_a_command_in_silence() -> None:
    with server() as (_, address):
        command = [sys.executable, "-m", "engine", "generate", "hold", "--address", address]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stderr is not None
            child.stdout.close()  # before the first word
            assert (child.wait(30), child.stderr.read()) == (141, b"")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["generate", b"caf\xe9"], "prompt"), (["generate", "x", "--regex", b"\xff+"], "--regex")],
    ids=["prompt", "regex"],
)
def test_an_argument_that_is_not_utf8_is_bad_usage_and_named(arguments: list[str | bytes], name: str) -> None:
    done = subprocess.run([sys.executable, "-m", "engine", *arguments], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"engine: error: {name}: ")
    assert done.stderr.count(b"\n") == 1


def test_a_taken_port_is_one_line_and_exit_code_1() -> None:
    with server() as (_, address), process("serve", "/m", "--port", address.rpartition(":")[2]) as second:
        out, err = second.communicate(timeout=30)
        assert (second.returncode, out) == (1, "")
        assert err == f"engine: error: cannot listen on {address}: address already in use\n"


def test_what_does_not_fit_is_one_line_and_exit_code_2() -> None:
    with process("serve", "/too/big", "--port", "0") as child:
        _, err = child.communicate(timeout=30)
        assert (child.returncode, err) == (2, "engine: error: kv_cache_memory_bytes: 1 is less than one block\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_drain_with_exit_code_0(number: signal.Signals) -> None:
    with server("--grace", "3600") as (child, address), subprocess.Popen(
        [sys.executable, "-m", "engine", "generate", "hold", "--address", address],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as client:  # fmt: skip
        assert client.stdout.read(4) == "held"
        child.send_signal(number)
        while "draining" not in (line := child.stderr.readline()):
            assert line, "the server did not wait for the live stream"
        assert engine("health", "--address", address) == (1, "NOT_SERVING\n", "")
        child.send_signal(number)
        assert child.wait(30) == 0
        _, err = client.communicate(timeout=30)
        assert client.returncode == 1
        assert err.startswith("engine: error: ") and err.count("\n") == 1


def test_standard_streams_that_were_closed_are_opened() -> None:
    """Else the next socket takes their number, and libuv aborts when it is closed (`engine serve >&-`)."""
    check = "import os; from engine.cli.main import _open_standard_streams as f; f(); [os.fstat(n) for n in range(3)]"
    command = f"exec {sys.executable} -c '{check}' <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, check=False).returncode == 0


def test_what_answers_at_an_address_is_said() -> None:
    with process("serve", "/m", "--port", "0", "--http-port", "0") as child:
        assert child.stdout is not None
        child.stdout.readline()
        http = child.stdout.readline().strip().removeprefix("http on http://")
        code, _, err = engine("health", "--address", http)
        assert code == 1 and f"what answers at {http} speaks HTTP, not gRPC" in err
    code, _, err = engine("health", "--address", http)
    assert code == 1 and f"no server answers at {http}" in err


def test_an_empty_schema_is_an_error_of_its_flag(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("")
    code, _, err = engine("generate", "x", "--json-schema", str(tmp_path / "schema.json"))
    assert code == 2 and err.startswith("engine: error: --json-schema: not a JSON schema")


@pytest.mark.parametrize(
    ("size", "expected"), [("1GiB", 1 << 30), ("1.5 MiB", 3 << 19), ("512MB", 512_000_000), ("4096", 4096), ("2b", 2)]
)
def test_sizes_have_units(run: Run, started: Started, size: str, expected: int) -> None:
    assert run("serve", "/m", "--kv-cache-memory-bytes", size)[0] == 0
    assert started[0][0].kv_cache_memory_bytes == expected


def test_what_is_no_size(run: Run) -> None:
    code, _, err = run("serve", "/m", "--kv-cache-memory-bytes", "1GiBs")
    assert code == 2 and "'1GiBs' is not a size in bytes, such as 1073741824, 1GiB or 512MB" in err


def test_http_is_on_unless_it_is_not_wanted(run: Run, started: Started) -> None:
    for flags in ((), ("--no-http",), ("--http-port", "none")):
        assert run("serve", "/m", *flags)[0] == 0
    assert [options.http_port for _, options in started] == [8000, None, None]


def test_every_setting_has_one_place_in_the_help(run: Run) -> None:
    grouped = [name for _, names in GROUPS for name in names]
    settings = {f.name for config in (EngineConfig, ServerOptions) for f in fields(config)}
    assert sorted(grouped) == sorted({*settings, "no_http"})
    _, out, _ = run("serve", "--help")
    assert [line.rstrip(":") for line in out.splitlines() if line in {f"{heading}:" for heading, _ in GROUPS}] == [
        heading for heading, _ in GROUPS
    ]
    assert max(map(len, out.splitlines())) <= 80
