"""StructuredOutputs: what the text of a request must match, as the caller says it.

Names are vLLM's `StructuredOutputsParams`. Sizes are bounded here, before anything is compiled;
whether the grammar itself makes sense is known when `engine/grammar/grammar.py` has compiled it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import InvalidRequest
from engine.request.json_schema import compact

MAX_GRAMMAR_CHARS = 1 << 16
MAX_SCHEMA_CHARS = 1 << 20
"""Of a JSON schema's text with its annotations; what is left of it has at most MAX_GRAMMAR_CHARS."""
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one constraint on the output's text. Raises InvalidRequest naming the field.

    Attributes:
        json: a JSON schema, as JSON text or a mapping; kept as text, without annotations.
        json_object: any JSON object.
        regex: a regular expression that the whole text matches.
        choice: the text is one of these.
        grammar: a context-free grammar in Lark's syntax.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise InvalidRequest("structured_outputs", f"give exactly one of {names}; found {given or 'none'}")
        kind = given[0]
        if kind == "json":
            object.__setattr__(self, "json", _schema_text(self.json))
        elif kind == "json_object":
            if self.json_object is not True:
                raise InvalidRequest(_name(kind), "must be true or false")
        elif kind == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        else:
            _check_text(kind, getattr(self, kind))

    @property
    def kind(self) -> str:
        """The field that is set."""
        return next(f.name for f in fields(self) if getattr(self, f.name) not in (None, False))


def _name(kind: str) -> str:
    return f"structured_outputs.{kind}"


def _check_text(kind: str, value: object) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_GRAMMAR_CHARS:
        raise InvalidRequest(_name(kind), f"must be a string of 1 to {MAX_GRAMMAR_CHARS} characters")
    check_utf8(_name(kind), value)


def check_utf8(field: str, text: str) -> None:
    """Raises InvalidRequest for a text that JSON can spell but no encoding can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, "holds a lone surrogate") from error


def _schema_text(schema: object) -> str:
    if isinstance(schema, str) and len(schema) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(_name("json"), f"must have at most {MAX_SCHEMA_CHARS} characters")
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = compact(parsed) if isinstance(parsed, Mapping) else None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(_name("json"), f"not a JSON schema: {error}") from error
    if text is None:
        raise InvalidRequest(_name("json"), f"a schema is a JSON object, found {str(schema)[:40]}")
    _check_text("json", text)
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(_name("choice"), f"must be a list of 1 to {MAX_CHOICES} strings")
    for text in choices:
        _check_text("choice", text)
    if sum(map(len, choices)) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(_name("choice"), f"at most {MAX_GRAMMAR_CHARS} characters in all are allowed")
    return tuple(choices)
