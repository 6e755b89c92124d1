"""JSON schemas without what constrains nothing, as the compiler knows only the keywords that do.

A `format` that is not known is an annotation: JSON Schema 2020-12, Validation, 7.2.1.
"""

import json
from collections.abc import Mapping
from typing import Any

FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
"""Formats that constrain a string; those llguidance has."""

_ANNOTATIONS = {
    "title",
    "description",
    "$comment",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
}
_NO_OPS: list[tuple[str, Any]] = [
    ("uniqueItems", False),
    ("dependentRequired", {}),
    ("dependentSchemas", {}),
    ("unevaluatedProperties", True),
    ("unevaluatedItems", True),
]
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose value has schemas under names of the author's."""
_DATA = {"const", "enum"}


def constraining(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that allows the same values, without annotations, unknown formats and keywords without effect.

    Raises RecursionError.
    """
    return {key: _inside(key, value) for key, value in schema.items() if not _is_idle(key, value)}


def _is_idle(key: str, value: Any) -> bool:
    return key in _ANNOTATIONS or (key, value) in _NO_OPS or (key == "format" and value not in FORMATS)


def _inside(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if isinstance(value, list):
        return [_inside("", item) for item in value]
    if isinstance(value, dict):
        by_name = key in _BY_NAME
        return {name: _inside("", v) for name, v in value.items()} if by_name else constraining(value)
    return value


def compact(schema: Mapping[str, Any]) -> str:
    """What is left of the schema, as short JSON text. Raises RecursionError and, where it is not JSON, TypeError."""
    return json.dumps(constraining(schema), separators=(",", ":"), ensure_ascii=False)
