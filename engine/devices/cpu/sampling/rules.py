"""What may change a row's logits before they are sampled: bans, allowed ids, bias, penalties, masks.

`RowRules` is one row's rules and history; `gather_rules` lays those of a batch end to end for the compiled sampler.
Most rows have no rules at all and cost nothing. Order and meaning: `RowState` in `engine/plan.py`.
Read next: `apply_rules` in `engine/devices/cpu/sampling/sampler.py`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.plan import GREEDY_ROW, RowState

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class Rules(NamedTuple):
    """Rules of m rows; those of row i are elements [starts[i], starts[i + 1]) of the arrays that follow.

    Attributes:
        banned_ids: may not be sampled.
        allowed_ids: the only ids that may be sampled; none listed allows all.
        bias_ids, bias_values: added to the logits.
        seen_ids, seen_counts: distinct ids of prompt and output, and how often each is in the output.
        masks: [m, ceil(vocab / 32)] uint32 of allowed ids, or [0, 0].
    """

    banned_starts: Int64Array
    banned_ids: Int32Array
    allowed_starts: Int64Array
    allowed_ids: Int32Array
    bias_starts: Int64Array
    bias_ids: Int32Array
    bias_values: NDArray[np.float32]
    seen_starts: Int64Array
    seen_ids: Int32Array
    seen_counts: Int32Array
    masks: NDArray[np.uint32]


class RowRules:
    """Rules of one row, from its RowState; `append` keeps its history up to date."""

    def __init__(self, state: RowState, vocab_size: int) -> None:
        self._min_position = state.min_position
        self._ends = tuple(i for i in state.banned_ids if i < vocab_size)
        self._bad_words = tuple(word for word in state.bad_words if word and max(word) < vocab_size)
        self.allowed = np.array([i for i in state.allowed_ids if i < vocab_size], np.int32)
        bias = [(i, value) for i, value in state.logit_bias if i < vocab_size]
        self.bias_ids = np.array([i for i, _ in bias], np.int32)
        self.bias_values = np.array([value for _, value in bias], np.float32)
        self._needs_history = state.needs_history
        self._history = list(state.token_ids)
        self._counts: dict[int, int] = dict.fromkeys(state.token_ids, 0)
        for token in state.token_ids[state.prompt_len :]:
            self._counts[token] += 1

    @property
    def is_empty(self) -> bool:
        """Whether the row's logits are never changed."""
        rules = (self._ends, self._bad_words, self.allowed.size, self.bias_ids.size, self._needs_history)
        return not any(rules)

    def append(self, token: int) -> None:
        """The row sampled `token`."""
        if self._needs_history:
            self._history.append(token)
            self._counts[token] = self._counts.get(token, 0) + 1

    def banned(self, position: int) -> list[int]:
        """Ids that may not be sampled at `position`: end ids too early, last ids of bad words."""
        ends = self._ends if position < self._min_position else ()
        return [*ends, *(word[-1] for word in self._bad_words if self._follows(word[:-1]))]

    def _follows(self, words: tuple[int, ...]) -> bool:
        return not words or tuple(self._history[-len(words) :]) == words

    def seen(self) -> tuple[Int32Array, Int32Array]:
        """Distinct ids so far, and how often the output has each."""
        count = len(self._counts)
        return np.fromiter(self._counts, np.int32, count), np.fromiter(self._counts.values(), np.int32, count)


def gather_rules(rows: Sequence[RowRules | None], positions: Sequence[int], masks: NDArray[np.uint32] | None) -> Rules:
    """Rules of a batch; None is a row without any."""
    rules = _no_rules(len(rows)) if all(row is None for row in rows) else _gather(rows, positions)
    return rules if masks is None else rules._replace(masks=np.ascontiguousarray(masks))


@lru_cache(maxsize=64)
def _no_rules(count: int) -> Rules:
    """Most batches have none: kept, they cost a step of 32 rows 0.2 ms less."""
    return _gather([_NO_RULES] * count, [0] * count)


def _gather(rows: Sequence[RowRules | None], positions: Sequence[int]) -> Rules:
    present = [_NO_RULES if row is None else row for row in rows]
    seen = [row.seen() for row in present]
    banned = [np.array(row.banned(at), np.int32) for row, at in zip(present, positions, strict=True)]
    return Rules(
        *_end_to_end(banned),
        *_end_to_end([row.allowed for row in present]),
        *_end_to_end([row.bias_ids for row in present]),
        np.concatenate([np.zeros(0, np.float32), *(row.bias_values for row in present)]),
        *_end_to_end([ids for ids, _ in seen]),
        np.concatenate([_NO_IDS, *(counts for _, counts in seen)]),
        np.zeros((0, 0), np.uint32),
    )


_NO_IDS = np.zeros(0, np.int32)
_NO_RULES = RowRules(GREEDY_ROW, vocab_size=0)


def _end_to_end(arrays: Sequence[Int32Array]) -> tuple[Int64Array, Int32Array]:
    return np.cumsum([0, *map(len, arrays)], dtype=np.int64), np.concatenate([_NO_IDS, *arrays])
