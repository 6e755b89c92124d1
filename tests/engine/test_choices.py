"""Several choices of one request: n, best_of and beam search, against naive references."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.request.outputs import Delta
from engine.request.params import SamplingParams
from tests.engine.fake_device import expected, ranked
from tests.engine.server import Server, collect, serving


def by_choice(deltas: Sequence[Delta]) -> dict[int, list[int]]:
    outputs: dict[int, list[int]] = {}
    for delta in deltas:
        outputs.setdefault(delta.index, []).extend(delta.token_ids)
    return outputs


async def test_every_choice_streams_and_ends_once() -> None:
    async with serving() as server:
        deltas = await collect(server.generate([1, 2, 3, 4, 5], 6, n=3))
        assert by_choice(deltas) == {i: expected([1, 2, 3, 4, 5], 6, i) for i in range(3)}
        assert sorted(d.index for d in deltas if d.finish_reason) == [0, 1, 2]
        assert await server.is_clean()


async def test_aborting_ends_every_choice() -> None:
    async with serving() as server:
        stream = server.generate([1, 2], 500, n=4)
        async for _ in stream:
            break
        assert await server.is_clean()


async def test_a_choice_that_ends_early_leaves_the_others_running() -> None:
    stop = expected([1, 2], 3, 1)[-1]
    async with serving() as server:
        outputs = by_choice(await collect(server.generate([1, 2], 8, n=2, stop_token_ids=[stop])))
        assert outputs == {0: expected([1, 2], 8, 0), 1: expected([1, 2], 3, 1)}


async def test_best_of_returns_the_likeliest_and_only_then() -> None:
    prompt = [3, 1, 4]

    def score(choice: int) -> float:
        ids = expected(prompt, 5, choice)
        return sum(dict(ranked([*prompt, *ids[:i]])).get(ids[i], -9.0) for i in range(5))

    best = sorted(range(4), key=score, reverse=True)[:2]
    async with serving() as server:
        deltas = await collect(server.generate(prompt, 5, n=2, best_of=4, prompt_logprobs=0))
        assert [d.index for d in deltas if d.prompt_logprobs is not None] == [0]
        assert by_choice(deltas) == {i: expected(prompt, 5, c) for i, c in enumerate(best)}
        assert all(d.logprobs is None for d in deltas)
        last = [d.cumulative_logprob for d in deltas if d.finish_reason]
        assert last == pytest.approx([score(c) for c in best], abs=1e-5)
        assert await server.is_clean()


def naive_beam_search(
    prompt: list[int], width: int, max_tokens: int, ends: set[int], penalty: float, *, exhaustive: bool = True
) -> list[tuple[float, list[int]]]:
    """Every hypothesis, ended or out of length, best score first; nothing is shared.

    Unless `exhaustive`, it stops as Hugging Face's does: when the best live beam, scored at the length
    it has, does not beat the worst of the `width` best ended ones.
    """
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for step in range(1, max_tokens + 1):
        grown = [
            (logprob + value, [*ids, token])
            for logprob, ids in live
            for token, value in ranked([*prompt, *ids])[: 2 * width]
        ]
        live = []
        for logprob, ids in sorted(grown, key=lambda g: g[0], reverse=True):
            if len(live) == width:
                break
            if ids[-1] in ends:
                ended.append((logprob / step**penalty, ids))
            else:
                live.append((logprob, ids))
        best = sorted((score for score, _ in ended), reverse=True)[:width]
        if not exhaustive and len(best) == width and live and live[0][0] / step**penalty <= best[-1]:
            return sorted(ended, key=lambda e: e[0], reverse=True)
    ended += [(logprob / max_tokens**penalty, ids) for logprob, ids in live]
    return sorted(ended, key=lambda e: e[0], reverse=True)


async def search(server: Server, prompt: list[int], width: int, max_tokens: int, **params: Any) -> list[list[int]]:
    deltas = await collect(
        server.generate(prompt, max_tokens, n=2, best_of=width, use_beam_search=True, temperature=0, **params)
    )
    return [ids for _, ids in sorted(by_choice(deltas).items())]


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
async def test_beam_search_finds_what_the_naive_search_finds(width: int, penalty: float) -> None:
    async with serving(num_blocks=64) as server:
        for prompt in ([1, 2, 3], [4] * 9, [7, 7, 7, 7]):
            ends = {ranked([*prompt, *expected(prompt, 4)])[1][0]}
            wanted = [ids for _, ids in naive_beam_search(prompt, width, 7, ends, penalty)[:2]]
            found = await search(server, prompt, width, 7, length_penalty=penalty, stop_token_ids=list(ends))
            assert found == wanted
        assert await server.is_clean()


async def test_beams_survive_preemption_and_neighbours() -> None:
    async with serving(num_blocks=14, budget=8) as server:
        prompt = [5, 6, 7, 8, 9]
        neighbours = [asyncio.create_task(collect(server.generate([i] * 6, 24))) for i in range(2)]
        searches = [asyncio.create_task(search(server, prompt, 2, 12)) for _ in range(2)]
        wanted = [ids for _, ids in naive_beam_search(prompt, 2, 12, set(), 1.0)[:2]]
        assert [await s for s in searches] == [wanted, wanted]
        for i, task in enumerate(neighbours):
            assert by_choice(await task) == {0: expected([i] * 6, 24)}
        assert server.roster.num_preemptions > 0
        assert await server.is_clean()


async def test_beams_compute_the_prompt_once() -> None:
    async with serving(budget=64) as server:
        await search(server, list(range(20)), 3, 3)
        assert [int(p.num_tokens.sum()) for p in server.device.plans] == [20, 3, 3]


async def test_aborting_a_beam_search_cleans_up() -> None:
    async with serving(free_running=False) as server:
        stream = server.generate([1, 2], 50, n=2, use_beam_search=True)
        for step in range(1, 4):
            await server.until(lambda step=step: len(server.device.plans) >= step)  # type: ignore[misc]
            server.device.open(step)
        stream.cancel()
        assert await server.is_clean()


@pytest.mark.parametrize("field", ["top_p", "min_p", "repetition_penalty"])
def test_what_bends_the_ranking_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}: cannot be combined with use_beam_search"):
        SamplingParams(use_beam_search=True, **{field: 0.5})  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"n": 0}, {"n": 3, "best_of": 2}, {"n": 2, "max_tokens": 0}])
def test_impossible_numbers_of_choices_are_refused(params: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(**params)  # type: ignore[arg-type]
