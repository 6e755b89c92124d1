"""Decoding rows, the bulk of most steps: what is done for each of them in every step, and nothing else.

A sequence that decodes (`engine/sequence.py`) costs a step a few attributes when it is launched, a few when it is
settled, and no object of its own. Its rare needs (a block, an end, an adopted block) are the scheduler's.
Read next: `engine/scheduler.py`, docs/performance.md (what it costs).
"""

from typing import NamedTuple

import numpy as np

from engine.plan import PLACEHOLDER, Int32Array
from engine.sequence import Sequence

_ONE = np.int32(1)


class DecodeArrays(NamedTuple):
    """The decoding rows of a step as the plan has them. Arrays are shared between steps and never written.

    Attributes:
        rows, starts, num_tokens, token_ids, indices: [n]; `token_ids` are all PLACEHOLDER, `indices` count up.
        constrained: the sequences under a grammar, with their indices.
    """

    sequences: list[Sequence]
    rows: Int32Array
    starts: Int32Array
    num_tokens: Int32Array
    token_ids: Int32Array
    indices: Int32Array
    constrained: list[tuple[int, Sequence]]

    @classmethod
    def of(cls, sequences: list[Sequence]) -> "DecodeArrays":
        """Of sequences that have just been granted a token each."""
        n = len(sequences)
        return cls(
            sequences,
            np.array([s.row for s in sequences], np.int32),
            np.array([s.num_scheduled - 1 for s in sequences], np.int32),
            np.ones(n, np.int32),
            np.full(n, PLACEHOLDER, np.int32),
            np.arange(n, dtype=np.int32),
            [(i, s) for i, s in enumerate(sequences) if s.grammar is not None],
        )

    def next(self, sequences: list[Sequence]) -> "DecodeArrays":
        """Of the step after this one: mostly of the same sequences, which costs 3 us with 256 of them, where `of`
        takes 35. A sequence that decodes in two steps running is one position further."""
        if sequences != self.sequences:
            return DecodeArrays.of(sequences)
        starts = self.starts + _ONE
        return DecodeArrays(
            sequences, self.rows, starts, self.num_tokens, self.token_ids, self.indices, self.constrained
        )
