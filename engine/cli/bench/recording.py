"""Recording: arrivals and lengths from a file, one JSON object per line.

    {"seconds": 0.25, "input_len": 512, "output_len": 64, "prefix_id": "chat-1", "prefix_len": 256}

`seconds` counts from any moment; the first arrival is sent at once. `prefix_id` and `prefix_len` go together and
may be left out: prompts with the same id begin with the same tokens, as far as the shorter of their prefixes goes.
"""

import json
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from engine.cli.bench.workload import PREFIXES, TOKENS, PlannedRequest
from engine.errors import ConfigError
from loader.errors import shown


class Arrival(NamedTuple):
    """One line; `input_len` counts the prefix."""

    seconds: float
    input_len: int
    output_len: int
    prefix_id: str | None = None
    prefix_len: int = 0


def read_recording(lines: Iterable[str], limit: int | None = None) -> list[Arrival]:
    """The arrivals of a file in the order of their times, at most `limit` of them; blank lines are skipped.

    Raises ConfigError, naming line and field.
    """
    arrivals = [_arrival(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not arrivals:
        raise ConfigError("trace: it has no arrivals")
    return sorted(arrivals, key=lambda a: a.seconds)[:limit]


def recorded_requests(arrivals: list[Arrival], vocab_size: int, seed: int) -> list[PlannedRequest]:
    """The requests that the arrivals stand for, with token ids uniform below `vocab_size`."""
    rng = np.random.default_rng((seed, TOKENS))
    longest: dict[str, int] = {}
    for a in arrivals:
        if a.prefix_id is not None:
            longest[a.prefix_id] = max(a.prefix_len, longest.get(a.prefix_id, 0))
    prefixes = {
        name: np.random.default_rng((seed, PREFIXES, zlib.crc32(name.encode()))).integers(vocab_size, size=n).tolist()
        for name, n in longest.items()
    }
    return [
        PlannedRequest(
            a.seconds - arrivals[0].seconds,
            (prefixes[a.prefix_id][: a.prefix_len] if a.prefix_id is not None else [])
            + rng.integers(vocab_size, size=a.input_len - a.prefix_len).tolist(),
            a.output_len,
        )
        for a in arrivals
    ]


def _arrival(number: int, line: str) -> Arrival:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"trace: line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"trace: line {number} is not an object")
    if unknown := row.keys() - set(Arrival._fields):
        raise ConfigError(
            f"trace: line {number}: no such field: {min(unknown)}; there are {', '.join(Arrival._fields)}"
        )

    def number_of(name: str, low: float, kinds: tuple[type, ...] = (int,)) -> Any:
        value: Any = row.get(name)
        if type(value) not in kinds or not low <= value < 1e9:
            kind = "a number" if float in kinds else "a whole number"
            raise ConfigError(f"trace: line {number}: {name}: {shown(value)} must be {kind} of at least {low}")
        return value

    seconds = number_of("seconds", 0, (int, float))
    input_len, output_len = number_of("input_len", 1), number_of("output_len", 1)
    if ("prefix_id" in row) != ("prefix_len" in row):
        raise ConfigError(f"trace: line {number}: prefix_id and prefix_len go together")
    if "prefix_id" not in row:
        return Arrival(seconds, input_len, output_len)
    prefix_len = number_of("prefix_len", 0)
    if prefix_len > input_len:
        raise ConfigError(f"trace: line {number}: prefix_len: {prefix_len} is more than input_len {input_len}")
    return Arrival(seconds, input_len, output_len, str(row["prefix_id"]), prefix_len)
