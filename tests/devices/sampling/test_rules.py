"""Rules that change logits: each alone, in order, and only in its row."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from engine.devices.cpu.sampling.params import PARAMS
from engine.devices.cpu.sampling.rules import RowRules, gather_rules
from engine.devices.cpu.sampling.sampler import apply_rules
from engine.request.params import MAX_TEMPERATURE
from tests.devices.driver import GREEDY
from tests.devices.sampling.test_sampler import sample

VOCAB = 70
LOGITS = np.linspace(-4, 4, VOCAB).astype(np.float32)
INF = np.inf


@njit
def _apply(values, rules, row, params, changed):  # type: ignore[no-untyped-def]
    return apply_rules(values, rules, row, params, changed)


def applied(
    logits: NDArray[np.float32], position: int = 9, masks: Any = None, sampled: tuple[int, ...] = (), **state: Any
) -> NDArray[np.float32]:
    """The row's logits after its rules, the row being the second of two; the first has none."""
    state_ = replace(GREEDY, **state)
    row = RowRules(state_, len(logits))
    for token in sampled:
        row.append(token)
    rules = gather_rules([None, row], [position, position], masks)
    params = np.zeros(2, PARAMS)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        params[name] = getattr(state_, name)
    before = logits.copy()
    if masks is None:
        np.testing.assert_array_equal(_apply(logits, rules, 0, params[0], np.empty_like(logits)), before)
    result = _apply(logits, rules, 1, params[1], np.empty_like(logits))
    np.testing.assert_array_equal(logits, before)
    return np.asarray(result)


def test_penalties_by_hand() -> None:
    """Prompt [5, 5, 6], output [6]; presence 1, frequency .5 touch 6 only, repetition 2 both, whatever the count."""
    logits = np.full(8, 4.0, np.float32)
    history: dict[str, Any] = {"token_ids": (5, 5, 6, 6), "prompt_len": 3}
    changed = applied(logits, presence_penalty=1.0, frequency_penalty=0.5, **history)
    assert changed.tolist() == [4, 4, 4, 4, 4, 4, 2.5, 4]
    assert applied(logits, repetition_penalty=2.0, **history).tolist() == [4, 4, 4, 4, 4, 2, 2, 4]
    assert applied(-logits, repetition_penalty=2.0, **history).tolist() == [-4, -4, -4, -4, -4, -8, -8, -4]


def test_sampled_tokens_count_as_output_at_once() -> None:
    logits = np.zeros(8, np.float32)
    changed = applied(logits, frequency_penalty=0.5, token_ids=(1,), prompt_len=1, sampled=(1, 3, 3))
    assert changed.tolist() == [0, -0.5, 0, -1, 0, 0, 0, 0]


def test_bias_is_added_before_penalties() -> None:
    logits = np.full(4, -1.0, np.float32)
    changed = applied(logits, logit_bias=((2, 3.0), (3, -100.0)), repetition_penalty=2.0, token_ids=(2,), prompt_len=1)
    assert changed.tolist() == [-1, -1, 1, -101]


def test_allowed_ids_and_masks_intersect() -> None:
    mask = np.zeros((2, 3), np.uint32)
    mask[1] = 1 << 31, 0b101, 1 << 5  # ids 31, 32, 34, 69
    changed = applied(LOGITS, masks=mask, allowed_ids=(3, 32, 69))
    assert np.flatnonzero(changed > -INF).tolist() == [32, 69]
    assert changed[69] == LOGITS[69]


def test_the_highest_temperature_leaves_what_is_allowed() -> None:
    row = RowRules(replace(GREEDY, allowed_ids=(3, 69)), VOCAB)
    rules = gather_rules([row] * 40, [1] * 40, None)
    hot = [{"temperature": MAX_TEMPERATURE, "seed": seed} for seed in range(40)]
    ids, faulted = sample(np.stack([LOGITS] * 40), hot, rules)
    assert set(ids) == {3, 69} and not any(faulted)


@pytest.mark.parametrize("position, banned", [(8, [2, 3]), (9, [])])
def test_end_ids_are_banned_below_their_position(position: int, banned: list[int]) -> None:
    changed = applied(LOGITS, position, banned_ids=(2, 3, VOCAB), min_position=9)
    assert np.flatnonzero(changed == -INF).tolist() == banned


def test_bad_words_ban_their_last_id_after_the_ids_before() -> None:
    words: dict[str, Any] = {"bad_words": ((7,), (1, 2), (2, 1, 4)), "token_ids": (9, 2), "prompt_len": 2}
    assert np.flatnonzero(applied(LOGITS, **words) == -INF).tolist() == [7]
    assert np.flatnonzero(applied(LOGITS, sampled=(1,), **words) == -INF).tolist() == [2, 4, 7]


def test_a_fault_stays_visible_under_rules_and_nothing_left_is_one() -> None:
    logits = np.stack([LOGITS] * 3)
    logits[0, 0] = np.nan
    ban = RowRules(replace(GREEDY, banned_ids=(0,), min_position=5), VOCAB)
    nothing = RowRules(replace(GREEDY, allowed_ids=(1,), banned_ids=(1,), min_position=5), VOCAB)
    rules = gather_rules([ban, nothing, None], [1, 1, 1], None)
    assert sample(logits, [{"temperature": 0.0}] * 3, rules) == ([0, 0, VOCAB - 1], [True, True, False])
