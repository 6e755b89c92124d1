"""SamplingParams as callers send them: what the converters of all interfaces share.

A field has one name everywhere, the engine's (`engine/request/params.py`), and one type, read off SamplingParams. An
interface says only what it has otherwise. An unset field is left out, so that its default is written once. No I/O, no
state. Read next: `rpc/convert.py`, `rpc/http/sampling.py`, `rpc/router/params.py`.
"""

from collections.abc import Collection, Mapping, Sequence
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from engine.request.params import SamplingParams
from loader.generation import SAMPLING_DEFAULTS, GenerationConfig


def _plain_type(hint: Any) -> Any:
    """`int` of `int | None`."""
    return next(h for h in get_args(hint) if h is not type(None)) if isinstance(hint, UnionType) else hint


_TYPES = {name: _plain_type(hint) for name, hint in get_type_hints(SamplingParams).items()}

SCALARS: dict[str, type] = {name: kind for name, kind in _TYPES.items() if kind in (bool, int, float)}
"""Fields of one value, and its type."""
LISTS: dict[str, type] = {name: get_args(kind)[0] for name, kind in _TYPES.items() if get_origin(kind) is Sequence}
"""Fields of a list, and the type of its items."""


def set_fields(message: Message, without: Collection[str] = ()) -> dict[str, Any]:
    """What a protobuf message gives, by field, in copies: a protobuf container would keep its message alive."""
    return {field.name: _copied(value) for field, value in message.ListFields() if field.name not in without}


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def with_defaults(
    asked: Mapping[str, Any], defaults: GenerationConfig, names: Collection[str] = SAMPLING_DEFAULTS
) -> dict[str, Any]:
    """What is not None of `asked`, and for those of `names` that are left out what the model's folder says.

    A beam search takes no defaults: it samples nothing.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if given.get("use_beam_search"):
        return given
    return {name: value for name in names if (value := getattr(defaults, name)) is not None} | given
