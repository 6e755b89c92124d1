"""`engine config`, and the layers that it and `engine serve` take their settings from."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from engine.config import EngineConfig
from rpc.options import ServerOptions
from tests.cli.conftest import Started
from tests.conftest import Run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.toml"
    path.write_text('model = "/from/file"\nmax_num_seqs = 8\nenable_prefix_caching = false\nport = 6000\nseed = 1\n')
    return path


def test_config_prints_every_value_and_its_origin(run: Run, file: Path) -> None:
    code, out, err = run(
        *("config", "--config", str(file), "--seed", "9", "--no-enable-chunked-prefill"),
        ENGINE_PORT="7000", ENGINE_SEED="5", ENGINE_MAX_MODEL_LEN="none",
    )  # fmt: skip
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert set(rows) == {f.name for c in (EngineConfig, ServerOptions) for f in fields(c)}
    assert rows["model"] == ["/from/file", "file", str(file)]
    assert rows["max_num_seqs"] == ["8", "file", str(file)]
    assert rows["enable_prefix_caching"] == ["false", "file", str(file)]
    assert rows["enable_chunked_prefill"] == ["false", "flag", "--enable-chunked-prefill"]
    assert rows["port"] == ["7000", "environment", "ENGINE_PORT"]
    assert rows["seed"] == ["9", "flag", "--seed"]
    assert rows["max_model_len"] == ["none", "environment", "ENGINE_MAX_MODEL_LEN"]
    assert rows["block_size"] == ["16", "default"]


def test_config_as_json(run: Run, file: Path) -> None:
    code, out, err = run("config", "/m", "--json", "--max-model-len", "none", ENGINE_CONFIG=str(file))
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert rows["model"] == {"value": "/m", "origin": "flag", "source": "--model"}
    assert rows["max_model_len"] == {"value": None, "origin": "flag", "source": "--max-model-len"}
    assert rows["max_num_seqs"] == {"value": 8, "origin": "file", "source": str(file)}
    assert rows["dtype"] == {"value": "auto", "origin": "default", "source": None}


def test_config_shows_the_path_of_a_secret_and_not_the_secret(run: Run, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("s3cret acme")
    _, out, _ = run("config", ENGINE_API_KEY_FILE=str(tmp_path / "keys"))
    assert str(tmp_path / "keys") in out and "s3cret" not in out


def test_config_mentions_variables_that_set_nothing(run: Run) -> None:
    code, _, err = run("config", ENGINE_MAX_SEQS="3", ENGINE_CACHE_DIR="/x")
    assert (code, err) == (0, "engine: note: no such setting: ENGINE_MAX_SEQS (ENGINE_MAX_NUM_SEQS?)\n")


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ([], {"ENGINE_BLOCK_SIZE": "x"}, "ENGINE_BLOCK_SIZE: 'x' is not an integer"),
        (["--block-size", "x"], {}, "Invalid value for '--block-size': 'x' is not an integer"),
        (["--block-size", "0"], {}, "'--block-size': 0 is out of range, must be between 1 and 256"),
        (["--config", "/no/file"], {}, "/no/file: No such file or directory"),
        (
            [],
            {"ENGINE_MAX_NUM_BATCHED_TOKENS": "3"},
            "so that not every row could decode in a step "
            "(max_num_batched_tokens is from ENGINE_MAX_NUM_BATCHED_TOKENS)",
        ),
        (["a", "--model", "b"], {}, "give the model once"),
        (["/m", "--api-key-file", "/no/file"], {}, "api_key_file: /no/file cannot be read"),
        (["/m", "--ssl-certfile", "/no/file", "--ssl-keyfile", "/no/key"], {}, "/no/file and /no/key cannot be used"),
        (["/m", "--ssl-certfile", "/no/file"], {}, "ssl_keyfile, ssl_certfile: one needs the other"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(
    run: Run, arguments: list[str], environment: dict[str, str], says: str
) -> None:
    for command in ("config", "serve"):
        code, out, err = run(command, *(arguments or ["/m"]), **environment)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("engine: error: ") and says in err


def test_serve_takes_all_layers(run: Run, file: Path, started: Started) -> None:
    assert run("serve", "--config", str(file), "--grace", "2", ENGINE_BLOCK_SIZE="32")[0] == 0
    assert started == [
        (
            EngineConfig(model="/from/file", max_num_seqs=8, enable_prefix_caching=False, block_size=32, seed=1),
            ServerOptions(port=6000, grace=2.0),
        )
    ]


def test_a_model_on_the_command_line_goes_before_the_others(run: Run, file: Path, started: Started) -> None:
    for arguments in (["/flag"], ["--model", "/flag"]):
        assert run("serve", *arguments, ENGINE_MODEL="/env", ENGINE_CONFIG=str(file))[0] == 0
    assert run("serve", ENGINE_MODEL="/env", ENGINE_CONFIG=str(file))[0] == 0
    assert [config.model for config, _ in started] == ["/flag", "/flag", "/env"]
