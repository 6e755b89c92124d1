"""Per-row state that outlives a step: sampling parameters and rules, block tables, the last sampled id.

Changed only by the differences that plans carry. A row's state is whole after its `RowState`;
entries of block tables beyond what a row has computed are never read.
"""

import numpy as np
from numpy.typing import NDArray

from engine.devices.cpu.sampling.params import PARAMS
from engine.devices.cpu.sampling.rules import RowRules, Rules, gather_rules
from engine.plan import BlockUpdate, Int32Array, RowState


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
        self._rules: list[RowRules | None] = [None] * max_num_seqs

    def initialise(self, state: RowState) -> None:
        params = self.params[state.row]
        params["temperature"], params["top_p"], params["min_p"] = state.temperature, state.top_p, state.min_p
        params["top_k"], params["seed"], params["choice"] = state.top_k, state.seed, state.choice
        self.num_logprobs[state.row] = state.num_logprobs
        self.num_prompt_logprobs[state.row] = state.num_prompt_logprobs
        params["presence_penalty"], params["frequency_penalty"] = state.presence_penalty, state.frequency_penalty
        params["repetition_penalty"] = state.repetition_penalty
        rules = RowRules(state, self._vocab_size)
        self._rules[state.row] = None if rules.is_empty else rules

    def update_blocks(self, update: BlockUpdate) -> None:
        """Raises ValueError for a block that doesn't exist: reading it would be reading wild memory."""
        if not all(0 <= block < self._num_blocks for block in update.blocks):
            raise ValueError(f"row {update.row}: blocks {update.blocks} outside [0, {self._num_blocks})")
        table = self.block_tables[update.group, update.row]
        table[update.first : update.first + len(update.blocks)] = update.blocks

    def rules(self, rows: Int32Array, positions: Int32Array, masks: NDArray[np.uint32] | None) -> Rules:
        """Rules for sampling the tokens at `positions`."""
        return gather_rules([self._rules[row] for row in rows], positions.tolist(), masks)

    def append(self, rows: Int32Array, ids: Int32Array) -> None:
        """Rows sampled these ids."""
        self.last_ids[rows] = ids
        for row, token in zip(rows, ids, strict=True):
            rules = self._rules[row]
            if rules is not None:
                rules.append(int(token))
