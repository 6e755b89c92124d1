"""Flag over environment over file over default, and messages that name the source."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.cli.settings import Problems, Setting, SettingsFile, read_file, resolve
from engine.config import EngineConfig, kinds_of
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
            "ENGINE_SIZE: 'x' is not an integer; a.toml: share: -2 is out of range, must be at least 0; "
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
