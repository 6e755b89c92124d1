"""`debuggable`: a command's exceptions become a line on stderr and an exit code; `--debug` adds the traceback."""

import functools
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import click

from engine.cli.settings import name_sources
from engine.errors import ConfigError, EngineError, InvalidRequest
from loader.errors import CheckpointError

Command = TypeVar("Command", bound=Callable[..., None])

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


class BadUsage(click.ClickException):
    """A setting or a request that cannot work as written; click's own errors exit with 1."""

    exit_code = USAGE


def debuggable(command: Command) -> Command:
    """Give a command `--debug`, and turn its exceptions into one line and an exit code."""

    @click.option("--debug", is_flag=True, help="Print the traceback of an error.")
    @functools.wraps(command)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            _leave_pipe()
        except Exception as error:
            if debug:
                traceback.print_exc()
            if isinstance(error, UnicodeEncodeError) and (name := _not_utf8(kwargs)):
                raise BadUsage(f"{name}: is not UTF-8") from error
            if isinstance(error, click.ClickException | click.exceptions.Exit):
                raise
            kind = BadUsage if isinstance(error, ConfigError | InvalidRequest) else click.ClickException
            address = getattr(kwargs.get("server"), "address", "")
            raise kind(name_sources(_message(error, address))) from error

    return run  # type: ignore[return-value]


def _leave_pipe() -> NoReturn:
    """Whoever read our output has enough, as `head` has: end in silence, with a shell's code for SIGPIPE."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered is written at exit
    raise click.exceptions.Exit(BROKEN_PIPE)


def _not_utf8(arguments: Mapping[str, Any]) -> str | None:
    """The argument that holds bytes which are no UTF-8; Python has them as lone surrogates."""
    for name, value in arguments.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
                return name
    return None


def _message(error: Exception, address: str) -> str:
    grpc = sys.modules.get("grpc")  # a command that did not call a server has not imported it
    if grpc and isinstance(error, grpc.aio.AioRpcError):
        from rpc.client import describe

        return describe(error, address)
    if isinstance(error, EngineError | CheckpointError | OSError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"
