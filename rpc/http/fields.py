"""Fields: the JSON object of a request, read field by field.

A value of a wrong type is refused under its path. null is the same as absent, and fields that nobody reads are
ignored, as OpenAI and vLLM have it; `unread` tells which.
"""

import json
from typing import Any, NoReturn, Self, TypeVar

from engine.errors import InvalidRequest

MAX_OBJECTS = 1 << 16
MAX_VALUES = 1 << 20
"""Items of a list of objects and of one of plain values: to look at so many takes the event loop 0.1 s."""

T = TypeVar("T", str, int, float, bool)

_NOUNS: dict[type, str] = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


class Fields:
    """One object; `path` is its place in the body, "" for the body itself."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """A request's body. Raises InvalidRequest when it is not a JSON object."""
        try:
            values = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("body", f"is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise InvalidRequest("body", "must be a JSON object")
        return cls(values)

    def path(self, name: str) -> str:
        """How errors call the field."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """The value as JSON has it, None when absent."""
        self._read.add(name)
        return self._values.get(name)

    def get(self, name: str, kind: type[T]) -> T | None:
        """The value, or None when absent. An integer is a number, too."""
        value = self.raw(name)
        return None if value is None else _checked(self.path(name), value, kind)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean with a default."""
        value = self.get(name, bool)
        return default if value is None else value

    def list_of(self, name: str, kind: type[T]) -> list[T] | None:
        """A list whose items are all of one kind, or None when absent."""
        value = self.raw(name)
        if value is None:
            return None
        self._check_list(name, value, MAX_VALUES)
        for i, item in enumerate(value):
            if type(item) is not kind:
                _checked(f"{self.path(name)}[{i}]", item, kind)
        return value  # type: ignore[no-any-return]

    def child(self, name: str) -> "Fields | None":
        """An object, or None when absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
        return Fields(value, self.path(name))

    def children(self, name: str) -> "list[Fields] | None":
        """A list of objects, or None when absent."""
        value = self.raw(name)
        if value is None:
            return None
        self._check_list(name, value, MAX_OBJECTS)
        for i, item in enumerate(value):
            if not isinstance(item, dict):
                self.refuse(f"{name}[{i}]", "must be an object")
        return [Fields(item, f"{self.path(name)}[{i}]") for i, item in enumerate(value)]

    def _check_list(self, name: str, value: Any, most: int) -> None:
        if not isinstance(value, list):
            self.refuse(name, "must be a list")
        if len(value) > most:
            self.refuse(name, f"{len(value)} items, at most {most} are allowed")

    def unread(self) -> set[str]:
        """Fields that hold something and that nobody has asked for."""
        return {name for name, value in self._values.items() if value is not None} - self._read

    def as_dict(self) -> dict[str, Any]:
        """The object itself."""
        return self._values

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raise InvalidRequest that names the field."""
        raise InvalidRequest(self.path(name), reason)


def _checked(path: str, value: Any, kind: type[T]) -> T:
    fits = type(value) in (int, float) if kind is float else type(value) is kind
    if not fits:
        raise InvalidRequest(path, f"{_shown(value)} is not {_NOUNS[kind]}")
    return value  # type: ignore[no-any-return]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
