"""Workload: requests of random lengths that arrive at random times; the same for the same seed.

Lengths, arrivals and tokens are drawn from streams of their own, so that another rate sends the same prompts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.errors import ConfigError

LENGTHS, ARRIVALS, TOKENS, PREFIXES = range(4)
"""The random streams of a seed."""


class PlannedRequest(NamedTuple):
    """One request: seconds after the start at which it is due, token ids of its prompt, tokens to produce."""

    at: float
    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to send; names and meanings are those of vLLM's random data set. Raises ConfigError, naming the field.

    Attributes:
        num_prompts: requests to send.
        input_len: tokens of a prompt after its prefix.
        output_len: tokens to produce for each.
        range_ratio: both lengths are uniform in [len * (1 - ratio), len * (1 + ratio)], in whole tokens.
        prefix_len: tokens before them, which requests share.
        num_prefixes: how many different prefixes there are; each request has one of them, drawn uniformly.
        request_rate: arrivals per second, whatever the server does; infinity sends everything at once.
        burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process, below 1 comes in
            bursts, infinity is a constant gap.
    """

    num_prompts: int = 32
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    request_rate: float = math.inf
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        lowest = {"num_prompts": 1, "input_len": 0, "output_len": 1, "prefix_len": 0, "num_prefixes": 1, "seed": 0}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name}: {getattr(self, name)} is out of range, must be at least {low}")
        if self.input_len + self.prefix_len < 1:
            raise ConfigError("input_len: 0 is out of range without a prefix, must be at least 1")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio: {self.range_ratio} is out of range, must be at least 0 and below 1")
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is out of range, must be above 0")

    @property
    def max_len(self) -> int:
        """Most tokens that a request can have, prompt and output."""
        lengths = (self.input_len, self.output_len)
        return self.prefix_len + sum(_bounds(length, self.range_ratio)[1] for length in lengths)

    def requests(self, vocab_size: int) -> list[PlannedRequest]:
        """The requests in the order of their arrival, with token ids uniform below `vocab_size`."""
        lengths, tokens, choice = (np.random.default_rng((self.seed, s)) for s in (LENGTHS, TOKENS, PREFIXES))
        inputs = _draw(lengths, self.input_len, self.range_ratio, self.num_prompts)
        outputs = _draw(lengths, self.output_len, self.range_ratio, self.num_prompts)
        prefixes = choice.integers(vocab_size, size=(self.num_prefixes, self.prefix_len)).tolist()
        chosen = choice.integers(self.num_prefixes, size=self.num_prompts).tolist()
        return [
            # An empty prompt cannot be sent: a range around 1 may reach 0.
            PlannedRequest(at, prefixes[which] + tokens.integers(vocab_size, size=max(n, 1 - self.prefix_len)).tolist(),
                           max(out, 1))
            for at, which, n, out in zip(self.arrivals(), chosen, inputs, outputs, strict=True)
        ]  # fmt: skip

    def arrivals(self) -> Iterator[float]:
        """Seconds after the start at which each request is due; the first is at 0."""
        count = self.num_prompts - 1
        if math.isinf(self.request_rate):
            gaps = np.zeros(count)
        elif math.isinf(self.burstiness):
            gaps = np.full(count, 1 / self.request_rate)
        else:
            rng = np.random.default_rng((self.seed, ARRIVALS))
            gaps = rng.gamma(self.burstiness, 1 / (self.request_rate * self.burstiness), count)
        yield 0.0
        yield from np.cumsum(gaps).tolist()


def _bounds(length: int, ratio: float) -> tuple[int, int]:
    return math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))


def _draw(rng: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    low, high = _bounds(length, ratio)
    lengths: list[int] = rng.integers(low, high, size=count, endpoint=True).tolist()
    return lengths
