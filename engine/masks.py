"""Masks: the bits of the tokens that each row of a step may sample, for steps with rows under a grammar.

One array for the engine's life; devices copy what they are given. A few rows are filled by the loop itself, which
takes less than handing them over; many by several threads, as that is done without the GIL.
Read next: `engine/grammar.py`, `engine/loop.py` (when), `SampleBatch` in `engine/plan.py`.
"""

from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from engine.plan import StepResult
from engine.sequence import Sequence, Status

ROWS_PER_THREAD = 32
Constrained = tuple[int, Sequence]
"""A row of a batch under a grammar: its index there, and whose it is."""

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
        """Take in a step's tokens before it is settled; a sequence whose grammar has ended ends with its token."""
        for index, sequence in constrained:
            grammar = sequence.grammar
            if grammar is None or sequence.status is Status.FINISHED or result.faulted[index]:
                continue
            grammar.advance(int(result.token_ids[index]))
            if grammar.has_ended:
                sequence.end_with_next()

    def fill(self, num_rows: int, constrained: Seq[Constrained]) -> NDArray[np.uint32]:
        """Masks of a batch, [num_rows, words]; valid until the next. Rows without a grammar may sample every token,
        and so may those that have ended since the batch was made: what they sample is dropped."""
        self._array[:num_rows] = _ALL
        wanted = [(index, s) for index, s in constrained if s.status is not Status.FINISHED]
        parts = [wanted[i : i + ROWS_PER_THREAD] for i in range(0, len(wanted), ROWS_PER_THREAD)]
        if len(parts) == 1:
            self._fill(parts[0])
        else:
            list(self._pool.map(self._fill, parts))
        return self._array[:num_rows, : self._words]

    def _fill(self, constrained: Seq[Constrained]) -> None:
        address, nbytes = self._array.ctypes.data, self._array.strides[0]
        for index, sequence in constrained:
            if sequence.grammar is not None:
                sequence.grammar.fill(address + index * nbytes, nbytes)
            if sequence.params.ignore_eos:
                _without(self._array[index], sequence.eos_token_ids)


def _without(mask: NDArray[np.uint32], token_ids: Seq[int]) -> None:
    """Take tokens out, unless there are no others."""
    rest = mask.copy()
    for token_id in token_ids:
        rest[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if rest.any():
        mask[:] = rest
