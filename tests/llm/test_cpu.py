"""The offline API on the cpu device: results of a tiny Llama in float32 against tests/reference.py (float64)."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.request.outputs import RequestOutput
from loader.checkpoint import open_checkpoint
from loader.weights import plan_weights
from tests.conftest import GOLDEN
from tests.reference import Array, reference_greedy, reference_logits

FOLDER = GOLDEN / "llama"
CHECKPOINT = open_checkpoint(FOLDER)
WEIGHTS = plan_weights(FOLDER, CHECKPOINT.decoder)
SHORT, LONG = [1, 17, 300, 44, 5], [1 + 7 * i % 500 for i in range(40)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(FOLDER), device="cpu", dtype="float32", max_model_len=128, kv_cache_memory_bytes=8 << 20) as llm:
        yield llm


def ask(llm: LLM, prompt: Sequence[int], **params: Any) -> RequestOutput:
    (output,) = llm.generate({"prompt_token_ids": prompt}, SamplingParams(**params), use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids, output.finished) == (None, list(prompt), True)
    assert [c.index for c in output.outputs] == list(range(len(output.outputs)))
    return output


@cache
def logprobs_after(*ids: int) -> Array:
    """[len(ids), vocab] log-softmax of the reference's logits."""
    logits = reference_logits(CHECKPOINT.decoder, WEIGHTS, ids)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def cumulative(prompt: Sequence[int], output: Sequence[int]) -> float:
    rows = logprobs_after(*prompt, *output)[len(prompt) - 1 : -1]
    return float(rows[np.arange(len(output)), list(output)].sum())


def test_greedy_ids_with_everything_that_can_be_reported(llm: LLM) -> None:
    output = ask(llm, LONG, temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=0, ignore_eos=True)
    (choice,) = output.outputs
    assert choice.token_ids == reference_greedy(CHECKPOINT.decoder, WEIGHTS, LONG, 6)
    assert (choice.finish_reason, choice.stop_reason, choice.text) == ("length", None, "")
    assert choice.cumulative_logprob == pytest.approx(cumulative(LONG, choice.token_ids), abs=1e-3)

    expected = logprobs_after(*LONG, *choice.token_ids)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for i, position in enumerate(output.prompt_logprobs[1:]):
        assert position is not None and list(position) == [LONG[i + 1]]
        assert position[LONG[i + 1]].logprob == pytest.approx(expected[i, LONG[i + 1]], abs=1e-3)
        assert position[LONG[i + 1]].rank == 1 + (expected[i] > expected[i, LONG[i + 1]]).sum()
    assert choice.logprobs is not None and len(choice.logprobs) == 6
    for i, position in enumerate(choice.logprobs):
        row = expected[len(LONG) - 1 + i]
        best = np.argsort(-row)[:3].tolist()
        assert list(position) == best
        assert [p.rank for p in position.values()] == [1, 2, 3]
        assert [p.logprob for p in position.values()] == pytest.approx(row[best], abs=1e-3)


def test_a_prompt_seen_before_comes_from_the_cache(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    first, second = (ask(llm, LONG, temperature=0, max_tokens=4) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)  # whole blocks of 16
    assert first.outputs == second.outputs


def test_stop_ids(llm: LLM) -> None:
    greedy = reference_greedy(CHECKPOINT.decoder, WEIGHTS, SHORT, 3)
    (choice,) = ask(llm, SHORT, temperature=0, max_tokens=9, stop_token_ids=[greedy[2]], ignore_eos=True).outputs
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (greedy, "stop", greedy[2])


def test_choices_are_samples_of_their_own_and_best_of_keeps_the_likeliest(llm: LLM) -> None:
    sampled = {"temperature": 1.5, "seed": 3, "max_tokens": 5, "logprobs": 0, "ignore_eos": True}
    four = ask(llm, SHORT, n=4, **sampled).outputs
    assert len({tuple(c.token_ids) for c in four}) == 4
    for choice in four:
        assert choice.cumulative_logprob == pytest.approx(cumulative(SHORT, choice.token_ids), abs=1e-3)
    best = sorted(four, key=lambda c: cumulative(SHORT, c.token_ids), reverse=True)[:2]
    two = ask(llm, SHORT, n=2, best_of=4, **sampled).outputs
    assert [c.token_ids for c in two] == [c.token_ids for c in best]
    assert [c.cumulative_logprob for c in two] == pytest.approx([c.cumulative_logprob for c in best], abs=1e-5)


# -- beam search ---------------------------------------------------------------------------------


@dataclass
class Found:
    token_ids: list[int]
    score: float
    reason: str


def naive_beam_search(
    prompt: Sequence[int], width: int, max_tokens: int, stops: set[int], penalty: float, early: bool
) -> list[Found]:
    """Every continuation of every beam, sorted; one forward pass of the reference for each."""
    beams: list[list[int]] = [[]]
    ended: list[Found] = []

    def score(output: Sequence[int]) -> float:
        return cumulative(prompt, output) / len(output) ** penalty

    for length in range(1, max_tokens + 1):
        ranked = []
        for beam in beams:
            so_far, row = cumulative(prompt, beam), logprobs_after(*prompt, *beam)[-1]
            ranked += [(so_far + row[token], [*beam, token]) for token in np.argsort(-row)[: 2 * width].tolist()]
        ranked.sort(key=lambda pair: pair[0], reverse=True)
        margins = [a[0] - b[0] for a, b in itertools.pairwise(ranked[: 2 * width + 1])]
        assert min(margins) > 2e-4, "a tie that float32 may break the other way: take another prompt"
        beams = []
        for _, output in ranked:
            if len(beams) == width:
                break
            if output[-1] in stops:
                ended.append(Found(output, score(output), "stop"))
            else:
                beams.append(output)
        ended.sort(key=lambda found: found.score, reverse=True)
        if len(ended) >= width and (early or score(beams[0]) <= ended[width - 1].score):
            return ended
        if length == max_tokens:
            ended += [Found(beam, score(beam), "length") for beam in beams]
    return sorted(ended, key=lambda found: found.score, reverse=True)


@pytest.mark.parametrize(
    ("prompt", "width", "n", "penalty", "early"),
    [
        (SHORT, 2, 2, 1.0, False),
        (SHORT, 4, 4, 1.0, False),
        (SHORT, 4, 2, 0.0, False),
        (SHORT, 3, 3, 2.0, True),
        (LONG, 3, 3, 1.0, False),
        (LONG, 5, 1, -1.0, False),
    ],
)
@pytest.mark.parametrize("with_stops", [False, True], ids=["to the end", "stops"])
def test_beam_search_finds_what_a_naive_one_finds(
    llm: LLM, prompt: list[int], width: int, n: int, penalty: float, early: bool, with_stops: bool
) -> None:
    open_end = naive_beam_search(prompt, width, 5, set(), penalty, early)
    stops = {open_end[0].token_ids[1], open_end[-1].token_ids[2]} if with_stops else set()
    expected = naive_beam_search(prompt, width, 5, stops, penalty, early)[:n]
    output = ask(
        llm, prompt, use_beam_search=True, n=n, best_of=width, temperature=0, max_tokens=5, ignore_eos=True,
        stop_token_ids=sorted(stops), length_penalty=penalty, early_stopping=early,
    )  # fmt: skip
    assert [c.token_ids for c in output.outputs] == [f.token_ids for f in expected]
    assert [c.finish_reason for c in output.outputs] == [f.reason for f in expected]
    assert [c.cumulative_logprob for c in output.outputs] == pytest.approx(
        [cumulative(prompt, f.token_ids) for f in expected], abs=1e-3
    )
    assert with_stops == any(f.reason == "stop" for f in naive_beam_search(prompt, width, 5, stops, penalty, early))
