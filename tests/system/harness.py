"""What system tests share: run requests on a real engine and keep everything that was said about them."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.engine import Engine
from engine.request.outputs import Delta, TokenLogprobMap
from engine.request.params import SamplingParams
from engine.serving.stream import OutputStream


@dataclass
class Choice:
    """Deltas of one choice, joined."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobMap] = field(default_factory=list)
    finish: tuple[Any, Any] = (None, None)


@dataclass
class Answer:
    """Everything a stream said; two answers are equal if every id and every logprob is, bit for bit."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_logprobs: Sequence[TokenLogprobMap | None] | None = None
    cached: int = field(default=0, compare=False)
    deltas: list[Delta] = field(default_factory=list, compare=False, repr=False)

    @property
    def ids(self) -> list[int]:
        """Of the only choice."""
        (choice,) = self.choices.values()
        return choice.ids

    @property
    def text(self) -> str:
        """Of the only choice."""
        (choice,) = self.choices.values()
        return choice.text


def values(maps: Any) -> list[float]:
    """The logprob of the token in question at each position."""
    return [next(iter(m.values())).logprob for m in maps if m is not None]


async def answer_of(stream: OutputStream) -> Answer:
    answer = Answer()
    async for delta in stream:
        answer.deltas.append(delta)
        choice = answer.choices.setdefault(delta.index, Choice())
        choice.ids += delta.token_ids
        choice.text += delta.text
        choice.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            choice.finish = (delta.finish_reason, delta.stop_reason)
        if delta.prompt_logprobs is not None:
            answer.prompt_logprobs = delta.prompt_logprobs
    answer.cached = answer.deltas[0].num_cached_tokens
    return answer


async def ask(engine: Engine, prompt: str | Sequence[int], **params: Any) -> Answer:
    """One request, alone unless others run; EOS is ignored unless `params` says otherwise."""
    return await answer_of(engine.generate(prompt, SamplingParams(**{"ignore_eos": True, **params})))


Probe = tuple[Sequence[int], dict[str, Any]]


async def ask_among(engine: Engine, probes: Sequence[Probe], vocab: int, seed: int) -> list[Answer]:
    """Requests that come one after another, among random ones that arrive and leave while they run."""
    rng = np.random.default_rng(seed)
    mine = [asyncio.create_task(_late(i, ask(engine, prompt, **params))) for i, (prompt, params) in enumerate(probes)]
    done: asyncio.Future[list[Answer]] = asyncio.gather(*mine)
    while not done.done():
        crowd = [asyncio.create_task(_neighbour(engine, rng, vocab)) for _ in range(2)]
        pending: list[asyncio.Future[Any]] = [done, *crowd]
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    return done.result()


async def _late(turns: int, work: Awaitable[Answer]) -> Answer:
    for _ in range(5 * turns):
        await asyncio.sleep(0)
    return await work


async def _neighbour(engine: Engine, rng: np.random.Generator, vocab: int) -> None:
    """A request with random parameters, left after a random number of deltas."""
    prompt = rng.integers(0, vocab, int(rng.integers(1, 60))).tolist()
    length = int(rng.integers(1, 30))
    params = SamplingParams(
        max_tokens=length,
        temperature=float(rng.choice([0.0, 0.7, 3.0])),
        top_k=int(rng.integers(0, 9)),
        top_p=float(rng.uniform(0.2, 1)),
        presence_penalty=float(rng.choice([0.0, 1.5])),
        logprobs=int(rng.integers(0, 3)) if rng.random() < 0.3 else None,
        ignore_eos=True,
    )
    patience = int(rng.integers(1, 60))
    async for _ in engine.generate(prompt, params):
        patience -= 1
        if not patience:
            break


async def is_clean(engine: Engine) -> bool:
    """No block or row is held any more, and the books balance."""
    loop = engine._loop
    assert loop is not None
    while not loop.roster.is_idle:
        await asyncio.sleep(0.001)
    kv = loop.roster.kv
    return await engine.audit() == [] and kv.num_available == kv.num_blocks
