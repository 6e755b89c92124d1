"""Layers of settings: a flag goes before the environment, that before a file, that before the default.

Settings are the fields of frozen dataclasses (`EngineConfig`, `rpc.options.ServerOptions`), whose metadata hold help
text and bounds. `max_num_seqs` is the flag `--max-num-seqs`, the variable `ENGINE_MAX_NUM_SEQS` and the key
`max_num_seqs` of the TOML file given with `--config`. Every value is checked where it comes from, so that a message
names the flag, variable or file. Read next: docs/configuration.md, `engine/cli/main.py`.
"""

import difflib
import functools
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource

from engine.config import EngineConfig, Kind, kinds_of
from rpc.options import ServerOptions

Origin = Literal["flag", "environment", "file", "default"]
Command = TypeVar("Command", bound=Callable[..., None])

PREFIX = "ENGINE_"
NOT_SETTINGS = {"ENGINE_CONFIG", "ENGINE_CACHE_DIR", "ENGINE_API_KEY", "ENGINE_CUBIN_DIR"}
"""Variables with our prefix that have another use: the file's path, the folder of demo models, a client's token."""

_META = "engine.cli.settings"


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective value.

    Attributes:
        source: the flag, variable or file it comes from, "" for a default.
    """

    name: str
    value: Any
    origin: Origin
    source: str


class Problems(Exception):
    """Everything wrong with the values of some sources, one line."""


def resolve(
    config: type[Any], flags: Mapping[str, Any], environment: Mapping[str, str], file: "SettingsFile"
) -> dict[str, Setting]:
    """The effective value of each field that has one; a field without default may have none.

    Args:
        flags: values given on the command line, checked already.

    Raises Problems.
    """
    effective: dict[str, Setting] = {}
    problems: list[str] = []
    kinds = kinds_of(config)
    for f in fields(config):
        name, kind = f.name, kinds[f.name]
        variable = PREFIX + name.upper()
        try:
            if name in flags:
                effective[name] = Setting(name, flags[name], "flag", f"--{name.replace('_', '-')}")
            elif environment.get(variable):
                source = variable
                effective[name] = Setting(name, kind.parse(environment[variable]), "environment", variable)
            elif name in file.values:
                source = f"{file.path}: {name}"
                effective[name] = Setting(name, kind.take(file.values[name]), "file", str(file.path))
            elif f.default is not MISSING:
                effective[name] = Setting(name, f.default, "default", "")
        except ValueError as error:
            problems.append(f"{source}: {error}")
    if problems:
        raise Problems("; ".join(problems))
    return effective


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """What a file says; no file says nothing."""

    path: Path | None
    values: Mapping[str, Any]


def read_file(path: Path | None, known: Sequence[str]) -> SettingsFile:
    """Raises Problems for a file that can't be read or has keys that are no settings."""
    if path is None:
        return SettingsFile(None, {})
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Problems(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Problems(f"{path}: not TOML: {error}") from error
    unknown = [_with_hint(key, known) for key in values if key not in known]
    if unknown:
        raise Problems(f"{path}: unknown setting: {', '.join(unknown)}")
    return SettingsFile(path, values)


def unknown_variables(environment: Mapping[str, str], known: Sequence[str]) -> list[str]:
    """Variables with our prefix that set nothing, each with the name that may be meant."""
    names = [PREFIX + name.upper() for name in known]
    unknown = environment.keys() - set(names) - NOT_SETTINGS
    return [_with_hint(name, names) for name in sorted(unknown) if name.startswith(PREFIX)]


def _with_hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"{name} ({close[0]}?)" if close else name


class Layers:
    """The settings of all commands; `options` gives one command those of one dataclass."""

    def __init__(self, *configs: type[Any]) -> None:
        self.known = [f.name for config in configs for f in fields(config)]

    def options(self, config: type[Any], partial: bool = False) -> Callable[[Command], Command]:
        """Decorate a command: flags for the fields of `config`, and effective values as its arguments.

        A field without default is an argument, too, and must have a value, unless `partial`, which leaves it out.
        """

        def decorate(command: Command) -> Command:
            @functools.wraps(command)
            def run(*args: Any, **kwargs: Any) -> None:
                context = click.get_current_context()
                given = {f.name: kwargs.pop(f.name) for f in shown}
                flags = {n: v for n, v in given.items() if _is_given(context, n)}
                for f in shown:
                    if f.default is MISSING:
                        _take_argument(f.name, kwargs.pop(_argument(f.name)), flags)
                try:
                    file = read_file(context.meta.get(_META + ".file"), self.known)
                    effective = resolve(config, flags, os.environ, file)
                except Problems as error:
                    raise click.UsageError(str(error)) from error
                context.meta.setdefault(_META, []).extend(effective[f.name] for f in shown if f.name in effective)
                for f in shown:
                    if f.name in effective:
                        kwargs[f.name] = effective[f.name].value
                    elif not partial:
                        raise click.UsageError(f"{_ways(f.name)} is needed")
                command(*args, **kwargs)

            shown = fields(config)
            kinds = kinds_of(config)
            decorated: Any = run
            if not any(p.name == "config_file" for p in getattr(command, "__click_params__", ())):
                decorated = _config_option(decorated)
            for f in reversed(shown):
                decorated = _flag(f, kinds[f.name])(decorated)
                if f.default is MISSING:
                    decorated = click.argument(_argument(f.name), metavar=f"[{f.name.upper()}]", required=False)(
                        decorated
                    )
            return decorated  # type: ignore[no-any-return]

        return decorate


def effective_settings() -> Iterator[Setting]:
    """The settings of the command that runs."""
    yield from click.get_current_context().meta.get(_META, ())


def name_sources(message: str) -> str:
    """A message that names settings, with the variable or file behind each."""
    context = click.get_current_context(silent=True)
    named = [
        f"{s.name} is from {s.source}"
        for s in (context.meta.get(_META, ()) if context else ())
        if s.origin in ("environment", "file") and re.search(rf"\b{s.name}\b", message)
    ]
    return f"{message} ({'; '.join(named)})" if named else message


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _argument(name: str) -> str:
    return f"{name}_argument"


def _take_argument(name: str, value: str | None, flags: dict[str, Any]) -> None:
    if value is None:
        return
    if name in flags:
        raise click.UsageError(f"give the {name} once, as {name.upper()} or as --{name}")
    flags[name] = value


def _ways(name: str) -> str:
    return f"{name.upper()} (or --{name}, {PREFIX}{name.upper()} or {name} in the file of --config)"


def _config_option(command: Command) -> Command:
    def keep(context: click.Context, _: click.Parameter, path: Path | None) -> None:
        context.meta[_META + ".file"] = path

    return click.option(
        "--config", "config_file", type=click.Path(path_type=Path), envvar="ENGINE_CONFIG", expose_value=False,
        callback=keep, metavar="FILE", help="TOML file of settings; flags and ENGINE_... variables go before it.",
    )(command)  # fmt: skip


def _flag(f: Field[Any], kind: Kind) -> Callable[[Command], Command]:
    def parse(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else kind.parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    flag, text = f"--{f.name.replace('_', '-')}", f.metadata["help"]
    if f.default is not MISSING and f.default is not None:
        text += f"  [default: {_spell(f.default)}]"
    if kind.type is bool and not kind.optional:
        return click.option(f"{flag}/--no-{flag[2:]}", f.name, default=None, help=text)
    return click.option(flag, f.name, callback=parse, metavar=kind.metavar, help=text)


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def settings_lines(settings: Sequence[Setting]) -> Iterator[str]:
    """Name, value and origin, in columns."""
    width = max((len(s.name) for s in settings), default=0)
    values = [_spell(s.value) for s in settings]
    value_width = min(max((len(v) for v in values), default=0), 40)
    for s, value in zip(settings, values, strict=True):
        yield f"{s.name:<{width}}  {value:<{value_width}}  {f'{s.origin} {s.source}'.strip()}"


LAYERS = Layers(EngineConfig, ServerOptions)
"""Of everything that can be set."""
