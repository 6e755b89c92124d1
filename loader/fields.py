"""Reading loosely typed JSON: files, and fields of one object with every problem collected.

Used for config.json, generation_config.json and tokenizer_config.json. A field that is null
counts as absent, as in transformers.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader.errors import CheckpointError, shown

MAX_SIZE = (1 << 31) - 1


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises CheckpointError naming the file when it is missing, broken or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(path, [f"cannot be read: {error.strerror or error}"]) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, [f"is not JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise CheckpointError(path, [f"holds a JSON {type(value).__name__}, expected an object"])
    return value


class Fields:
    """Typed access to one JSON object; what is wrong goes to `problems`, what was read to `used`.

    Every getter returns its default (or a harmless stand-in) after a problem, so that a
    reader can go on and report everything at once.
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str], prefix: str = "") -> None:
        self.values = {name: value for name, value in values.items() if value is not None}
        self.problems = problems
        self.used: set[str] = set()
        self._prefix = prefix

    def problem(self, name: str, reason: str) -> None:
        self.problems.append(f"{self._prefix}{name}: {reason}")

    def get(self, name: str) -> Any:
        self.used.add(name)
        return self.values.get(name)

    def size(self, name: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        """A positive integer; required when there is no default."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is int and 1 <= value <= maximum:
            return value
        found = "is missing" if value is None else f"found {shown(value)}"
        self.problem(name, f"{found}, expected an integer from 1 to {maximum}")
        return default or 1

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number above `above`; required when there is no default."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) in (int, float) and math.isfinite(value) and value > above:
            return float(value)
        found = "is missing" if value is None else f"found {shown(value)}"
        self.problem(name, f"{found}, expected a number above {above:g}")
        return default or 1.0

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.problem(name, f"found {shown(value)}, expected true or false")
        return default

    def unused(self) -> list[str]:
        """Fields that hold something and that nobody has read."""
        return sorted(set(self.values) - self.used)
