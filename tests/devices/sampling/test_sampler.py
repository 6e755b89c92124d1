"""Every sampling rule against tests/devices/sampling/reference.py, rows of different kinds side by side."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.devices.cpu.sampling.params import PARAMS
from engine.devices.cpu.sampling.rules import Rules, gather_rules
from engine.devices.cpu.sampling.sampler import _LARGEST_NOISE, sample_rows, token_logprobs
from tests.devices.sampling.reference import gumbel_noise, kept_tokens, log_softmax

OFF: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "choice": 0,
    "position": 1,
    "repetition_penalty": 1.0,
}


def sample(
    logits: NDArray[np.float32], rows: list[dict[str, Any]], rules: Rules | None = None, threads: int = 1
) -> tuple[list[int], list[bool]]:
    """Sample row i of `logits` with OFF | rows[i]."""
    params = np.zeros(len(rows), PARAMS)
    for record, row in zip(params, rows, strict=True):
        for name, value in (OFF | row).items():
            record[name] = value
    rules = rules or gather_rules([None] * len(rows), [1] * len(rows), None)
    ids, faulted = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.bool_)
    scratch = np.full((threads, 3, logits.shape[1]), np.nan)
    for thread in range(threads):
        sample_rows(logits, logits.shape[1], params, rules, ids, faulted, scratch, thread, threads)
    return ids.tolist(), faulted.tolist()


def support(probabilities: list[float], **row: Any) -> set[int]:
    """Every id that 400 seeds produce."""
    logits = np.log(np.array([probabilities], np.float32)).repeat(400, 0)
    return set(sample(logits, [row | {"seed": seed} for seed in range(400)])[0])


@pytest.mark.parametrize(
    "probabilities, top_p, kept",
    [
        ([0.5, 0.3, 0.15, 0.05], 0.6, {0, 1}),
        ([0.5, 0.3, 0.15, 0.05], 0.5, {0}),
        ([0.5, 0.3, 0.15, 0.05], 0.8, {0, 1}),
        ([0.05, 0.9, 0.05], 0.5, {1}),
        ([0.25, 0.25, 0.25, 0.25], 0.5, {0, 1}),
        ([0.1, 0.4, 0.1, 0.4], 0.81, {0, 1, 3}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(probabilities: list[float], top_p: float, kept: set[int]) -> None:
    assert support(probabilities, top_p=top_p) == kept


def test_top_k_beyond_the_vocabulary_or_off_is_off_in_a_mixed_batch() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 37)).astype(np.float32).repeat(6, 0)
    ids, faulted = sample(logits, [{"top_k": k, "seed": 4} for k in (9999999, 37, 38, 0, -1, 1)])
    assert len(set(ids[:5])) == 1
    assert ids[5] == int(logits[0].argmax())
    assert not any(faulted)


def test_top_k_ties_go_to_lower_ids() -> None:
    assert support([0.25, 0.25, 0.25, 0.25], top_k=2) == {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-5, 1e-30, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_tiny_temperatures_are_greedy(temperature: float, top_p: float) -> None:
    logits = np.random.default_rng(1).uniform(-60, 60, (40, 101)).astype(np.float32)
    ids, faulted = sample(logits, [{"temperature": temperature, "top_p": top_p, "seed": s} for s in range(40)])
    assert ids == logits.argmax(-1).tolist()
    assert not any(faulted)


def test_greedy_ties_go_to_the_lower_id() -> None:
    assert sample(np.array([[1, 3, 3, 2]], np.float32), [{"temperature": 0.0}])[0] == [1]


def test_a_token_far_below_the_best_wins_when_its_noise_says_so() -> None:
    """One token has 1 in 3 of the mass against 4,000 that lie 9 below it."""
    logits = np.zeros((24, 4001), np.float32)
    logits[:, 0] = 9.0
    ids, _ = sample(logits, [{"seed": seed} for seed in range(24)])
    noise = [gumbel_noise(seed, 1, 0, 4001) for seed in range(24)]
    assert ids == [int((row + extra).argmax()) for row, extra in zip(logits, noise, strict=True)]
    assert 0 < ids.count(0) < 24


def test_no_noise_is_larger_than_what_lets_tokens_be_skipped() -> None:
    assert 22.8 < -math.log(-math.log1p(-0.5 * 2.0**-32)) < _LARGEST_NOISE


parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, -1, 1, 2, 5, 30, 1000]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        "seed": st.integers(0, (1 << 63) - 1),
        "choice": st.integers(0, 5),
        "position": st.integers(1, 1 << 20),
    }
)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(parameters, min_size=1, max_size=4), seed=st.integers(0, 99), coarse=st.booleans())
def test_ids_are_the_references(rows: list[dict[str, Any]], seed: int, coarse: bool) -> None:
    """Gumbel-max over the filtered tokens with the documented noise; `coarse` logits are full of ties."""
    vocab = 61
    noise = np.random.default_rng(seed).standard_normal((len(rows), vocab)) * 3
    logits = (np.round(noise) if coarse else noise).astype(np.float32)
    ids, faulted = sample(logits, rows, threads=2)
    assert not any(faulted)
    for values, row, token in zip(logits.astype(np.float64), rows, ids, strict=True):
        kept = kept_tokens(values, row["temperature"], row["top_k"], row["top_p"], row["min_p"])
        noise = gumbel_noise(row["seed"], row["position"], row["choice"], vocab)
        score = (values - values.max()) / row["temperature"] + noise
        assert token in kept
        assert score[token] > max(score[i] for i in kept) - 1e-4  # float32 logits over temperature


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.1, 0.025])
    logits = np.log(probabilities).astype(np.float32)[None].repeat(20000, 0)
    ids, _ = sample(logits, [{"position": i} for i in range(20000)])
    counts = np.bincount(ids, minlength=5)
    expected = probabilities * 20000
    assert ((counts - expected) ** 2 / expected).sum() < 23.5  # chi-squared, 4 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("row", [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.9}])
def test_faults_stay_in_their_row(row: dict[str, Any]) -> None:
    healthy = np.random.default_rng(2).standard_normal(33).astype(np.float32)
    logits = np.stack([healthy] * 6)
    logits[1, 7] = np.nan
    logits[2] = np.nan
    logits[3, 0] = np.inf
    logits[4] = -np.inf
    ids, faulted = sample(logits, [row] * 6)
    assert faulted == [False, True, True, True, True, False]
    assert ids[0] == ids[5] == sample(healthy[None], [row])[0][0]


def test_minus_infinity_is_never_sampled() -> None:
    logits = np.full((200, 9), -np.inf, np.float32)
    logits[:, 4] = logits[:, 6] = -50.0
    assert set(sample(logits, [{"seed": s} for s in range(200)])[0]) == {4, 6}


def test_logprobs_ranks_and_alternatives() -> None:
    logits = np.round(np.random.default_rng(3).standard_normal((5, 41)) * 4).astype(np.float32)  # ties
    logits[4, :39] = -np.inf
    tokens, k = np.array([0, 5, 40, 7, 40], np.int32), 6
    values, ranks = np.zeros(5, np.float32), np.zeros(5, np.int32)
    top_ids, top_values = np.zeros((5, k), np.int32), np.zeros((5, k), np.float32)
    rows = np.array([0, 1, 2, 4])
    for thread in range(2):
        token_logprobs(logits, 41, rows, tokens, k, values, ranks, top_ids, top_values, thread, 2)
    for row in rows:
        expected = log_softmax(logits[row].astype(np.float64))
        order = sorted(range(41), key=lambda i: (-logits[row, i], i))
        assert top_ids[row].tolist() == order[:k]
        np.testing.assert_allclose(top_values[row], expected[order[:k]], rtol=1e-6)
        np.testing.assert_allclose(values[row], expected[tokens[row]], rtol=1e-6)
        assert ranks[row] == order.index(tokens[row]) + 1
    assert not ranks[3]
