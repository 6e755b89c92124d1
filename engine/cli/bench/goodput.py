"""Goodput: requests that met their service level objectives, per second.

Objectives have vLLM's syntax, `ttft:200`, in milliseconds. Definition: DistServe (Zhong et al., 2024).
"""

from collections.abc import Iterable, Mapping

from engine.errors import ConfigError
from loader.errors import shown

OBJECTIVES = ("ttft", "tpot", "e2el")
"""Time to first token, time per output token, and the whole request's latency."""


def parse_objectives(texts: Iterable[str]) -> dict[str, float]:
    """Seconds by name, of texts such as "ttft:200". Raises ConfigError."""
    objectives = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            milliseconds = float(limit)
        except ValueError:
            milliseconds = -1.0
        if name not in OBJECTIVES or not milliseconds >= 0:
            raise ConfigError(
                f"goodput: {shown(text)} is not NAME:MILLISECONDS with a name of {', '.join(OBJECTIVES)} and 0 or more"
            )
        objectives[name] = milliseconds / 1e3
    return objectives


def meets(objectives: Mapping[str, float], latencies: Mapping[str, float]) -> bool:
    """Whether every latency that has an objective is within it."""
    return all(latencies[name] <= limit for name, limit in objectives.items())
