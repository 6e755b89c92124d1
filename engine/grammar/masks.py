"""Masks: the bits of the tokens that each row of a step may sample, for steps with rows under a grammar.

One array for the engine's life; devices copy what they are given. A few rows are filled by the loop itself, which
takes less than handing them over; many by several threads, as that is done without the GIL.
Read next: `engine/grammar/grammar.py`, `engine/loop.py` (when), `SampleBatch` in `engine/plan.py`.
"""

from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from engine.grammar.grammar import Grammar
from engine.plan import StepResult

ROWS_PER_THREAD = 32
Constrained = tuple[int, Grammar]
"""A row of a batch under a grammar: its index there, and where its output is in it."""

_ALL = np.uint32(0xFFFFFFFF)


class Masks:
    """Belongs to the loop.

    Args:
        max_rows: of a batch.
        vocab_size: the model's; a mask has ceil(vocab_size / 32) words.
        grammar_vocab_size: what the grammars were compiled for, not less.
    """

    def __init__(self, max_rows: int, vocab_size: int, grammar_vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._array = np.empty((max_rows, -(-grammar_vocab_size // 32)), np.uint32)
        self._pool = ThreadPoolExecutor(thread_name_prefix="masks")

    def advance(self, constrained: Seq[Constrained], result: StepResult) -> None:
        """Take in a step's tokens; before it is settled, as a grammar that has ended ends its sequence."""
        for index, grammar in constrained:
            if not result.faulted[index]:
                grammar.advance(int(result.token_ids[index]))

    def fill(self, num_rows: int, constrained: Seq[Constrained]) -> NDArray[np.uint32]:
        """Masks of a batch, [num_rows, words]; valid until the next. Rows without a grammar may sample every token."""
        self._array[:num_rows] = _ALL
        parts = [constrained[i : i + ROWS_PER_THREAD] for i in range(0, len(constrained), ROWS_PER_THREAD)]
        if len(parts) == 1:
            self._fill(parts[0])
        else:
            list(self._pool.map(self._fill, parts))
        step_seconds = sum(grammar.seconds for _, grammar in constrained)
        for _, grammar in constrained:
            grammar.charge(step_seconds)
        return self._array[:num_rows, : self._words]

    def _fill(self, constrained: Seq[Constrained]) -> None:
        address, nbytes = self._array.ctypes.data, self._array.strides[0]
        for index, grammar in constrained:
            grammar.fill(address + index * nbytes, nbytes)
            if grammar.unwanted_ids:
                _without(self._array[index], grammar.unwanted_ids)


def _without(mask: NDArray[np.uint32], token_ids: Seq[int]) -> None:
    """Take tokens out, unless there are no others."""
    rest = mask.copy()
    for token_id in token_ids:
        rest[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if rest.any():
        mask[:] = rest
