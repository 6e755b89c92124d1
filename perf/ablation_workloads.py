"""The drivers of perf/ablation.py: who asks for what and when, and what is measured of the answers.

A driver sends requests to an engine and measures. What a better engine no longer does is done here, from outside:
one token per request for want of a KV cache, batches that wait for their last. Read next: perf/ablation.py.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

from engine.engine import Engine
from engine.request.params import SamplingParams


class Request(NamedTuple):
    """A prompt and how many tokens are wanted, for each of `n` choices."""

    prompt: list[int]
    max_tokens: int
    n: int = 1


@dataclass
class Measured:
    """What a driver saw, in seconds.

    Attributes:
        ttft: of every request, from when it was wanted to its first token.
        tpot: of every token after the first of its choice, since the one before.
        outputs: ids of every choice, in the order of the requests.
    """

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, asked: float, arrivals: Iterable[list[float]]) -> None:
        """When the tokens of the choices of a request came."""
        choices = list(arrivals)
        self.ttft.append(min(times[0] for times in choices) - asked)
        for times in choices:
            self.tpot += [b - a for a, b in pairwise(times)]


Driver = Callable[[Engine, list[Request], Measured], Awaitable[None]]


async def at_once(engine: Engine, requests: list[Request], measured: Measured) -> None:
    """All are sent at the start; the engine lets them in as it has room."""
    asked = perf_counter()
    outputs = await asyncio.gather(*(_send(engine, r, measured, asked) for r in requests))
    measured.outputs += [ids for choices in outputs for ids in choices]


def in_batches(size: int) -> Driver:
    """Static batching: the next `size` are sent when the last of those before has ended."""
    return partial(_in_batches, size=size)


async def _in_batches(engine: Engine, requests: list[Request], measured: Measured, *, size: int) -> None:
    asked = perf_counter()
    for first in range(0, len(requests), size):
        batch = requests[first : first + size]
        outputs = await asyncio.gather(*(_send(engine, r, measured, asked) for r in batch))
        measured.outputs += [ids for choices in outputs for ids in choices]


async def recomputing(engine: Engine, requests: list[Request], measured: Measured) -> None:
    """No KV cache: every token is a request of its own, whose prompt is all that came before."""
    asked = perf_counter()

    async def one(request: Request) -> list[int]:
        ids: list[int] = []
        arrivals: list[float] = []
        for _ in range(request.max_tokens):
            (more,) = await _send(engine, Request(request.prompt + ids, 1), Measured(), 0.0)
            ids += more
            arrivals.append(perf_counter())
        measured.note(asked, [arrivals])
        return ids

    measured.outputs += await asyncio.gather(*map(one, requests))


def in_turns(turns: int) -> Driver:
    """Conversations: `turns` requests in a row each, whose prompts go on behind all that was said before."""
    return partial(_in_turns, turns=turns)


async def _in_turns(engine: Engine, requests: list[Request], measured: Measured, *, turns: int) -> None:
    async def converse(said: list[Request]) -> list[list[int]]:
        history: list[int] = []
        outputs = []
        for request in said:
            prompt = history + request.prompt
            (ids,) = await _send(engine, request._replace(prompt=prompt), measured, perf_counter())
            history = prompt + ids
            outputs.append(ids)
        return outputs

    talks = [requests[i : i + turns] for i in range(0, len(requests), turns)]
    for outputs in await asyncio.gather(*map(converse, talks)):
        measured.outputs += outputs


async def long_among_short(engine: Engine, requests: list[Request], measured: Measured) -> None:
    """Requests for one token come one after another while the others decode; TPOT is of the others."""
    short, long = [r for r in requests if r.max_tokens > 1], [r for r in requests if r.max_tokens == 1]
    others = asyncio.create_task(at_once(engine, short, measured))
    prompts = Measured()
    for request in long:
        prompts.outputs += await _send(engine, request, prompts, perf_counter())
    await others
    measured.ttft += prompts.ttft
    measured.outputs += prompts.outputs


async def _send(engine: Engine, request: Request, measured: Measured, asked: float) -> list[list[int]]:
    """Ids of every choice, when all have ended."""
    params = SamplingParams(max_tokens=request.max_tokens, n=request.n, temperature=0.0, ignore_eos=True)
    outputs: list[list[int]] = [[] for _ in range(request.n)]
    arrivals: list[list[float]] = [[] for _ in range(request.n)]
    async for delta in engine.generate(request.prompt, params):
        outputs[delta.index] += delta.token_ids
        arrivals[delta.index] += [perf_counter()] * len(delta.token_ids)
    measured.note(asked, arrivals)
    return outputs


# -- requests -------------------------------------------------------------------------------


class Maker:
    """Makes requests of random ids, the same every time."""

    def __init__(self, vocab_size: int, quick: bool) -> None:
        self._vocab_size = vocab_size
        self._quick = quick

    def mixed(self, count: int = 40) -> list[Request]:
        """64 to 256 tokens in and 32 to 128 out, uniformly."""
        rng = random.Random(0)
        lengths = [(rng.randint(64, 256), rng.randint(32, 128)) for _ in range(count)]
        return [Request(self._ids(rng, n), self._tokens(out)) for n, out in lengths[: self._count(count)]]

    def first_mixed(self) -> list[Request]:
        """The first four of them."""
        return self.mixed()[:4]

    def long_among_short(self) -> list[Request]:
        """Twelve of 32 tokens that want 160, and six of 1,536 that want one."""
        rng = random.Random(1)
        short = [Request(self._ids(rng, 32), self._tokens(160)) for _ in range(self._count(12))]
        return short + [Request(self._ids(rng, 1536 if not self._quick else 48), 1) for _ in range(self._count(6))]

    def conversations(self) -> list[Request]:
        """Four conversations of five turns: a system prompt of 192 tokens, 48 a turn, 32 out."""
        rng = random.Random(2)
        system = self._ids(rng, 192)
        return [
            Request(self._ids(rng, 48) if turn else system + self._ids(rng, 48), self._tokens(32))
            for _ in range(self._count(4))
            for turn in range(5)
        ]

    def questions(self) -> list[Request]:
        """Twelve questions of 32 tokens behind one document of 1,024, 16 out."""
        return self._behind(1024, self._count(12), 32, 16)

    def few_shot(self) -> list[Request]:
        """24 queries of 24 tokens behind the same examples of 384, 8 out."""
        return self._behind(384, self._count(24), 24, 8)

    def several(self) -> list[Request]:
        """Four prompts of 256 tokens, 8 choices of 48 tokens each."""
        rng = random.Random(4)
        return [Request(self._ids(rng, 256), self._tokens(48), n=8) for _ in range(self._count(4))]

    def apart(self) -> list[Request]:
        """The same, every choice a request of its own."""
        return [r._replace(n=1) for r in self.several() for _ in range(r.n)]

    def _behind(self, common: int, count: int, own: int, out: int) -> list[Request]:
        rng = random.Random(3)
        document = self._ids(rng, common // 8 if self._quick else common)
        return [Request(document + self._ids(rng, own), self._tokens(out)) for _ in range(count)]

    def _ids(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(self._vocab_size) for _ in range(count)]

    def _count(self, count: int) -> int:
        return min(count, 4) if self._quick else count

    def _tokens(self, count: int) -> int:
        return min(count, 6) if self._quick else count
