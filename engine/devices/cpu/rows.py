"""Per-row state that outlives a step: sampling parameters, block tables, the last sampled id.

Changed only by the differences that plans carry. A row's state is whole after its `RowState`;
entries of block tables beyond what a row has computed are never read.
"""

import numpy as np

from engine.plan import BlockUpdate, RowState
from engine.sampling.params import PARAMS


class Rows:
    """State of `max_num_seqs` rows.

    Attributes:
        params: [rows] records of PARAMS; `position` is filled in per step.
        num_logprobs, num_prompt_logprobs: [rows], -1 is off.
        last_ids: [rows] id sampled last.
        block_tables: [groups, rows, blocks per row].
    """

    def __init__(self, max_num_seqs: int, groups: int, blocks_per_row: int, num_blocks: int, vocab_size: int) -> None:
        self.params = np.zeros(max_num_seqs, PARAMS)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.last_ids = np.zeros(max_num_seqs, np.int32)
        self.block_tables = np.zeros((groups, max_num_seqs, blocks_per_row), np.int32)
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._min_position = np.zeros(max_num_seqs, np.int64)
        self._banned: list[tuple[int, ...]] = [()] * max_num_seqs

    def initialise(self, state: RowState) -> None:
        params = self.params[state.row]
        params["temperature"], params["top_p"], params["min_p"] = state.temperature, state.top_p, state.min_p
        params["top_k"], params["seed"], params["choice"] = state.top_k, state.seed, state.choice
        self.num_logprobs[state.row] = state.num_logprobs
        self.num_prompt_logprobs[state.row] = state.num_prompt_logprobs
        self._min_position[state.row] = state.min_position
        self._banned[state.row] = tuple(i for i in state.banned_ids if i < self._vocab_size)

    def update_blocks(self, update: BlockUpdate) -> None:
        """Raises ValueError for a block that doesn't exist: reading it would be reading wild memory."""
        if not all(0 <= block < self._num_blocks for block in update.blocks):
            raise ValueError(f"row {update.row}: blocks {update.blocks} outside [0, {self._num_blocks})")
        table = self.block_tables[update.group, update.row]
        table[update.index : update.index + len(update.blocks)] = update.blocks

    def banned(self, row: int, position: int) -> tuple[int, ...]:
        """Ids that may not be sampled at `position`."""
        return self._banned[row] if position < self._min_position[row] else ()
