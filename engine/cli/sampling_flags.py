"""The sampling flags that `engine generate` and `engine chat` share."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from engine.request.params import SamplingParams
from engine.request.structured import StructuredOutputs

if TYPE_CHECKING:
    from rpc.proto.engine.v1 import engine_pb2 as pb

Command = TypeVar("Command", bound=Callable[..., None])


def sampling_flags(max_tokens: int) -> Callable[[Command], Command]:
    """Give a command sampling flags, and a checked `pb.SamplingParams` as its argument `sampling`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> None:
            values = {name: kwargs.pop(name) for name in names}
            constraint = {kind: values.pop(flag) or None for flag, kind in _CONSTRAINTS.items()}
            command(*args, sampling=_message({n: v for n, v in values.items() if v is not None}, constraint), **kwargs)

        options = (
            click.option("--max-tokens", type=int, default=max_tokens, show_default=True, help="Most tokens to make."),
            click.option("--min-tokens", type=int, help="No end before this many tokens."),
            click.option("--temperature", type=float, help="0 is greedy."),
            click.option("--top-p", type=float, help="Keep the likeliest tokens up to this mass."),
            click.option("--top-k", type=int, help="Keep this many tokens."),
            click.option("--min-p", type=float, help="Keep tokens at least this share as likely as the likeliest."),
            click.option("--repetition-penalty", type=float, help="Above 1, tokens seen before become less likely."),
            click.option("--seed", type=int, help="Makes the answer repeatable."),
            click.option("--stop", multiple=True, help="String that ends the answer; may be given more than once."),
            click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the model's own end."),
            click.option("--json-schema", type=click.File(), help="Answer with JSON that the schema in FILE allows."),
            click.option("--regex", help="Answer with a text that this regular expression matches as a whole."),
            click.option("--choice", multiple=True, help="Answer with one of these; may be given more than once."),
        )
        decorated: Any = run
        for option in reversed(options):
            decorated = option(decorated)
        names = [parameter.name for parameter in decorated.__click_params__[-len(options) :]]
        return decorated  # type: ignore[no-any-return]

    return decorate


_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "choice": "choice"}
"""Flags of structured output, and what they are in StructuredOutputs."""
_CONSTRAINT_FLAGS = {kind: f"--{name.replace('_', '-')}" for name, kind in _CONSTRAINTS.items()}


def _message(values: dict[str, Any], constraint: dict[str, Any]) -> "pb.SamplingParams":
    """Raises InvalidRequest."""
    from rpc.convert import structured_outputs
    from rpc.errors import renamed
    from rpc.proto.engine.v1 import engine_pb2 as pb

    SamplingParams(**values)  # protobuf's own complaint about a negative number names no field
    message = pb.SamplingParams(**values)
    if any(constraint.values()):
        if constraint["json"]:
            constraint["json"] = constraint["json"].read()
        with renamed(
            {f"structured_outputs.{kind}": f"--{flag.replace('_', '-')}" for flag, kind in _CONSTRAINTS.items()}
        ):
            message.structured_outputs.CopyFrom(structured_outputs(StructuredOutputs(**constraint)))
    return message
