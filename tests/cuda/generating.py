"""Whole engines on the cpu device and on the cuda device through the CuPy double, and what their outputs must share."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request.outputs import TokenLogprobMap
from engine.request.params import SamplingParams
from tests.gpu_without_gpu import fake_cupy

ARCH = "compute_80"
"""The double runs PTX; on a GPU the registry is asked for cubins."""


@dataclass(slots=True)
class Output:
    """One choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobMap] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobMap] = field(default_factory=list)
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    prompt: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Run:
    """Outputs per request and choice, and what the engine counted."""

    outputs: list[list[Output]]
    num_preemptions: int
    problems: list[str]


def greedy(max_tokens: int, **values: Any) -> SamplingParams:
    """Greedy, with the two most likely ids of each token, whose gap says what may differ between devices."""
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, "logprobs": 2} | values)


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[fake_cupy.Gpu]:
    """`cupy` is the double and kernels are compiled to PTX. Races are the kernels' own tests' to find."""
    monkeypatch.setattr("engine.devices.cuda.device.gpu_arch", lambda: ARCH)
    with fake_cupy.installed(fake_cupy.Settings(**{"check_races": False} | settings)) as double:
        yield double


async def generate(model: Path, waves: Sequence[Sequence[Request]], **settings: Any) -> Run:
    """Each wave of requests at once, the next when all of them have ended."""
    limits = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_logprobs": 2}
    async with Engine(EngineConfig(model=str(model), **{**limits, **settings})) as engine:
        outputs = []
        for wave in waves:
            streams = [engine.generate(request.prompt, request.params) for request in wave]
            for stream, request in zip(streams, wave, strict=True):
                choices = [Output() for _ in range(request.params.n)]
                async for delta in stream:
                    choice = choices[delta.index]
                    choice.token_ids += delta.token_ids
                    choice.logprobs += delta.logprobs or ()
                    choice.prompt_logprobs += [m for m in delta.prompt_logprobs or () if m is not None]
                    choice.num_cached_tokens = max(choice.num_cached_tokens, delta.num_cached_tokens)
                outputs.append(choices)
        stats = await engine.stats()
        return Run(outputs, stats.num_preemptions, await engine.audit())


def assert_same_but_for_near_ties(expected: Run, actual: Run, bound: float) -> Counter[str]:
    """Ids are equal up to the first token whose two most likely ids are less than `bound` apart, and so are logprobs.

    Returns how many tokens were compared and how many sequences were left at a near tie.
    """
    counts: Counter[str] = Counter()
    for wants, gots in zip(expected.outputs, actual.outputs, strict=True):
        for want, got in zip(wants, gots, strict=True):
            assert len(want.token_ids) == len(got.token_ids)
            for ours, theirs in zip(want.prompt_logprobs, got.prompt_logprobs, strict=True):
                token = next(iter(ours))
                assert abs(ours[token].logprob - theirs[token].logprob) < bound
            for position, (ours, theirs) in enumerate(zip(want.logprobs, got.logprobs, strict=True)):
                first, second = sorted((entry.logprob for entry in ours.values()), reverse=True)[:2]
                token, other = want.token_ids[position], got.token_ids[position]
                if token != other:
                    assert first - second < bound, f"token {position}: {other}, not {token}, by {first - second}"
                    counts["ties"] += 1
                    break
                assert abs(ours[token].logprob - theirs[token].logprob) < bound
                counts["tokens"] += 1
    return counts
