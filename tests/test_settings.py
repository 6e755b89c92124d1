"""Flag over environment over file over default, and messages that name the source."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from engine import cli
from engine.config import EngineConfig
from engine.settings import Problems, Setting, SettingsFile, kinds_of, read_file, resolve
from rpc.options import ServerOptions


@dataclass(frozen=True, kw_only=True)
class Example:
    """A field of each type."""

    size: int = field(default=16, metadata={"min": 1, "max": 256})
    share: float = field(default=0.5, metadata={"min": 0})
    limit: int | None = field(default=None, metadata={"min": 1})
    name: str | None = None
    caching: bool = True
    dtype: Literal["auto", "float32"] = "auto"


NO_FILE = SettingsFile(None, {})


def values(flags: dict[str, Any], environment: dict[str, str], file: dict[str, Any]) -> dict[str, Setting]:
    return resolve(Example, flags, environment, SettingsFile(Path("a.toml"), file))


def test_the_nearest_layer_wins() -> None:
    for flag, variable, key in ((f, v, k) for f in (0, 1) for v in (0, 1) for k in (0, 1)):
        setting = values(
            {"size": 1} if flag else {}, {"ENGINE_SIZE": "2"} if variable else {}, {"size": 3} if key else {}
        )["size"]
        if flag:
            assert setting == Setting("size", 1, "flag", "--size")
        elif variable:
            assert setting == Setting("size", 2, "environment", "ENGINE_SIZE")
        elif key:
            assert setting == Setting("size", 3, "file", "a.toml")
        else:
            assert setting == Setting("size", 16, "default", "")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("size", "256", 256),
        ("share", "2", 2.0),
        ("share", "1e-3", 0.001),
        ("limit", "none", None),
        ("limit", "None", None),
        ("limit", "7", 7),
        ("name", "none", None),
        ("name", "x y", "x y"),
        *((("caching"), text, True) for text in ("true", "True", "1", "yes", "on")),
        *((("caching"), text, False) for text in ("false", "FALSE", "0", "no", "off")),
        ("dtype", "float32", "float32"),
    ],
)
def test_spellings_in_the_environment(name: str, text: str, value: object) -> None:
    setting = values({}, {f"ENGINE_{name.upper()}": text}, {})[name]
    assert (setting.value, type(setting.value)) == (value, type(value))


def test_an_empty_variable_is_unset() -> None:
    assert values({}, {"ENGINE_SIZE": ""}, {})["size"].origin == "default"


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("size", 5, 5),
        ("share", 2, 2.0),
        ("limit", "none", None),
        ("limit", 3, 3),
        ("name", "none", None),
        ("caching", False, False),
        ("dtype", "auto", "auto"),
    ],
)
def test_values_in_a_file(name: str, value: object, taken: object) -> None:
    setting = values({}, {}, {name: value})[name]
    assert (setting.value, type(setting.value)) == (taken, type(taken))


@pytest.mark.parametrize(
    ("environment", "file", "says"),
    [
        ({"ENGINE_SIZE": "x"}, {}, "ENGINE_SIZE: 'x' is not an integer"),
        ({"ENGINE_SIZE": "none"}, {}, "ENGINE_SIZE: 'none' is not an integer"),
        ({"ENGINE_SIZE": "0"}, {}, "ENGINE_SIZE: 0 is out of range, must be between 1 and 256"),
        ({"ENGINE_SIZE": "1.5"}, {}, "ENGINE_SIZE: '1.5' is not an integer"),
        ({"ENGINE_SHARE": "nan"}, {}, "ENGINE_SHARE: nan is not a number"),
        ({"ENGINE_SHARE": "-1"}, {}, "ENGINE_SHARE: -1.0 is out of range, must be at least 0"),
        ({"ENGINE_LIMIT": "many"}, {}, "ENGINE_LIMIT: 'many' is not an integer, nor none"),
        ({"ENGINE_CACHING": "maybe"}, {}, "ENGINE_CACHING: 'maybe' is not true or false"),
        ({"ENGINE_DTYPE": "int3"}, {}, "ENGINE_DTYPE: 'int3' is not one of auto, float32"),
        ({}, {"size": "16"}, "a.toml: size: '16' is not an integer"),
        ({}, {"size": True}, "a.toml: size: True is not an integer"),
        ({}, {"caching": 1}, "a.toml: caching: 1 is not true or false"),
        ({}, {"name": 5}, "a.toml: name: 5 is not a string, nor none"),
        ({}, {"size": {"x": 1}}, "a.toml: size: {'x': 1} is not an integer"),
        (
            {"ENGINE_SIZE": "x", "ENGINE_DTYPE": "y"},
            {"share": -2},
            "ENGINE_SIZE: 'x' is not an integer; a.toml: share: -2.0 is out of range, must be at least 0; "
            "ENGINE_DTYPE: 'y' is not one of auto, float32",
        ),
    ],
)
def test_what_is_wrong_names_its_source(environment: dict[str, str], file: dict[str, Any], says: str) -> None:
    with pytest.raises(Problems) as caught:
        values({}, environment, file)
    assert str(caught.value) == says


def test_a_value_that_is_overridden_need_not_be_right() -> None:
    assert values({"size": 1}, {"ENGINE_SIZE": "x"}, {"size": "y"})["size"].value == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_num_seq = 3", "unknown setting: max_num_seq (max_num_seqs?)"),
        ("zzz = 1\nblock_size = 1\n[engine]\nport = 1", "unknown setting: zzz, engine"),
        ("port 5", "not TOML: "),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "e.toml"
    path.write_text(text)
    with pytest.raises(Problems) as caught:
        read_file(path, ["max_num_seqs", "block_size", "port"])
    assert str(caught.value).startswith(f"{path}: {says}")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(Problems, match=r"no\.toml: No such file"):
        read_file(tmp_path / "no.toml", [])


def test_every_setting_has_a_kind_and_its_default_is_one_of_its_values() -> None:
    for config in (EngineConfig, ServerOptions):
        kinds = kinds_of(config)
        for f in fields(config):
            kind = kinds[f.name]
            assert kind.noun and kind.metavar
            if f.name != "model":
                assert kind.parse(str(f.default)) == f.default


# -- the commands --------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("config", ..., ENGINE_X="...")` gives exit code, stdout and stderr."""
    for name in [n for n in os.environ if n.startswith("ENGINE_")]:
        monkeypatch.delenv(name)

    def call(*arguments: str, **environment: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as exited:
            for name, value in environment.items():
                patch.setenv(name, value)
            cli.main(arguments)
        out, err = capsys.readouterr()
        return exited.value.code or 0, out, err

    return call


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
    (tmp_path / "keys").write_text("s3cret")
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
    ],
)
def test_errors_are_one_line_with_exit_code_2(
    run: Run, arguments: list[str], environment: dict[str, str], says: str
) -> None:
    for command in ("config", "serve"):
        code, out, err = run(command, *(arguments or ["/m"]), **environment)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("engine: error: ") and says in err


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerOptions]]:
    calls: list[tuple[EngineConfig, ServerOptions]] = []

    async def start(config: EngineConfig, options: ServerOptions) -> None:
        calls.append((config, options))

    monkeypatch.setattr(cli, "_serve", start)
    return calls


def test_serve_takes_all_layers(run: Run, file: Path, started: list[tuple[EngineConfig, ServerOptions]]) -> None:
    assert run("serve", "--config", str(file), "--grace", "2", ENGINE_BLOCK_SIZE="32")[0] == 0
    assert started == [
        (
            EngineConfig(model="/from/file", max_num_seqs=8, enable_prefix_caching=False, block_size=32, seed=1),
            ServerOptions(port=6000, grace=2.0),
        )
    ]


def test_a_model_on_the_command_line_goes_before_the_others(
    run: Run, file: Path, started: list[tuple[EngineConfig, ServerOptions]]
) -> None:
    for arguments in (["/flag"], ["--model", "/flag"]):
        assert run("serve", *arguments, ENGINE_MODEL="/env", ENGINE_CONFIG=str(file))[0] == 0
    assert run("serve", ENGINE_MODEL="/env", ENGINE_CONFIG=str(file))[0] == 0
    assert [config.model for config, _ in started] == ["/flag", "/flag", "/env"]
