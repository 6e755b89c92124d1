"""Workload: requests of given lengths that arrive at a given rate; the same for the same seed."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

from engine.engine import Engine
from engine.errors import ConfigError
from engine.request import SamplingParams
from engine.stream import OutputStream

WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to run. Raises ConfigError from its constructor, naming the field.

    Attributes:
        num_prompts: requests to send.
        input_len: tokens of each prompt.
        output_len: tokens to produce for each; the model's own end is ignored.
        request_rate: arrivals per second, with exponential gaps and whatever the engine does (an open
            loop); infinity sends everything at once.
        shared_prefix_len: leading tokens that all prompts have in common.
    """

    num_prompts: int = 32
    input_len: int = 128
    output_len: int = 64
    request_rate: float = float("inf")
    shared_prefix_len: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("shared_prefix_len", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}: {getattr(self, name)} is out of range, must be at least {low}")
        if self.shared_prefix_len > self.input_len:
            raise ConfigError(f"shared_prefix_len: {self.shared_prefix_len} is more than input_len {self.input_len}")
        if not self.request_rate > 0:
            raise ConfigError(f"request_rate: {self.request_rate} is out of range, must be above 0")

    def prompts(self, vocab_size: int) -> Iterator[list[int]]:
        """Token ids of each prompt, drawn uniformly."""
        rng = random.Random(self.seed)
        prefix = rng.choices(range(vocab_size), k=self.shared_prefix_len)
        for _ in range(self.num_prompts):
            yield prefix + rng.choices(range(vocab_size), k=self.input_len - self.shared_prefix_len)

    def arrivals(self) -> Iterator[float]:
        """Seconds after the start at which each request is sent."""
        rng = random.Random(self.seed)
        at = 0.0
        for _ in range(self.num_prompts):
            yield at
            at += rng.expovariate(self.request_rate) if self.request_rate != float("inf") else 0.0


async def warm_up(engine: Engine) -> None:
    """Touch everything once, so that first uses do not count, and leave no trace in the prefix cache."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
    await _read(engine.generate([0] * min(WARMUP_TOKENS, engine.info.max_model_len - 2), params))
    await engine.reset_prefix_cache()


async def run(engine: Engine, workload: Workload) -> None:
    """Send the workload's requests, sampled greedily, and read every stream to its end.

    Raises ConfigError when the requests are longer than the engine takes.
    """
    length = workload.input_len + workload.output_len
    if length > engine.info.max_model_len:
        raise ConfigError(
            f"input_len + output_len: {workload.input_len} + {workload.output_len} is more than "
            f"max_model_len {engine.info.max_model_len}"
        )
    params = SamplingParams(max_tokens=workload.output_len, temperature=0.0, ignore_eos=True)
    prompts = list(workload.prompts(engine.info.vocab_size))
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.TaskGroup() as group:
        for prompt, arrival in zip(prompts, workload.arrivals(), strict=True):
            if (wait := start + arrival - loop.time()) > 0:
                await asyncio.sleep(wait)
            group.create_task(_read(engine.generate(prompt, params)))


async def _read(stream: OutputStream) -> None:
    async for _ in stream:
        pass
