"""Per-row state on the GPU: sampling parameters, rules, histories, block tables, the last sampled id.

Stable rows, changed only by the differences that plans carry: `stage` appends those of a plan to its slot,
`apply` scatters them once they are uploaded. Entries of block tables beyond what a row has computed are never read.
Read next: `engine/devices/cuda/ops/sampling.py`, whose kernels read this.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cuda.buffers import Spec
from engine.devices.cuda.ops import sampling
from engine.devices.cuda.ops.sampling import ROW_PARAMS, SamplingState, pack_row
from engine.devices.cuda.registry import KernelRegistry
from engine.devices.cuda.rules import RuleArena
from engine.devices.cuda.shape import CudaShape
from engine.devices.cuda.slots import Slot
from engine.plan import BlockUpdate, RowState


@dataclass(frozen=True, slots=True)
class _Scatter:
    """`items` records of `width` words for `target`; their indices and values begin at these words of the slot."""

    target: Any
    indices: int
    values: int
    items: int
    width: int


@dataclass(frozen=True, slots=True)
class _History:
    """A row's tokens so far, from word `first` of the slot."""

    row: int
    first: int
    length: int
    prompt_len: int


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan's differences, in its slot."""

    scatters: tuple[_Scatter, ...]
    histories: tuple[_History, ...]


def row_specs(shape: CudaShape) -> dict[str, Spec]:
    """Arrays of `Rows` on the GPU: name to shape and dtype, all of 32-bit words."""
    rows, integer = shape.max_num_seqs, np.dtype(np.int32)
    return {
        "block_tables": ((shape.num_groups, rows, shape.blocks_per_row), integer),
        "params": ((rows, ROW_PARAMS.itemsize // 4), integer),
        "counts": ((rows, shape.decoder.vocab_size), integer),
        "history": ((rows, shape.max_model_len), integer),
        "last_ids": ((rows,), integer),
    }


class Rows:
    """State of `max_num_seqs` rows.

    Attributes:
        num_logprobs, num_prompt_logprobs: [rows] on the host, -1 is off.
        block_tables: i32 [groups, rows, blocks per row].
        last_ids: i32 [rows].
    """

    def __init__(self, shape: CudaShape) -> None:
        import cupy

        arrays = {name: cupy.empty(dims, dtype) for name, (dims, dtype) in row_specs(shape).items()}
        self.num_logprobs = np.full(shape.max_num_seqs, -1, np.int32)
        self.num_prompt_logprobs = np.full(shape.max_num_seqs, -1, np.int32)
        self.block_tables, self.last_ids = arrays["block_tables"], arrays["last_ids"]
        self._params, self._counts, self._history = arrays["params"], arrays["counts"], arrays["history"]
        self._vocab, self._max_model_len = shape.decoder.vocab_size, shape.max_model_len
        self._rules = RuleArena()

    @property
    def state(self) -> SamplingState:
        """What the sampler reads and writes."""
        arrays = (self._params, self._rules.words, self._counts, self._history, self.last_ids)
        return SamplingState(*arrays, self._vocab, self._max_model_len)

    def stage(self, states: Sequence[RowState], updates: Sequence[BlockUpdate], slot: Slot, stream: Any) -> Staged:
        """Append the differences to the slot."""
        scatters: list[_Scatter] = []
        if states:
            scatters += self._stage_states(states, slot, stream)
        if updates:
            _, rows, width = self.block_tables.shape
            firsts = [(update.group * rows + update.row) * width + update.first for update in updates]
            blocks = [np.array(update.blocks, np.int32) for update in updates]
            scatters.append(_stage(slot, self.block_tables, _spans(firsts, blocks), np.concatenate(blocks), 1))
        histories = (
            _History(state.row, slot.put(np.array(state.token_ids, np.int32)), len(state.token_ids), state.prompt_len)
            for state in states
            if state.needs_history
        )
        return Staged(tuple(scatters), tuple(histories))

    def _stage_states(self, states: Sequence[RowState], slot: Slot, stream: Any) -> Iterable[_Scatter]:
        packed = [pack_row(state, self._vocab) for state in states]
        records, rules = np.concatenate([record for record, _ in packed]), [words for _, words in packed]
        firsts = [self._rules.place(state.row, len(words), stream) for state, words in zip(states, rules, strict=True)]
        records["rules"] = firsts
        records["history"] = [state.row if state.needs_history else sampling.NO_HISTORY for state in states]
        rows = np.array([state.row for state in states], np.int32)
        self.num_logprobs[rows] = [state.num_logprobs for state in states]
        self.num_prompt_logprobs[rows] = [state.num_prompt_logprobs for state in states]
        yield _stage(slot, self._params, rows, records.view(np.int32), self._params.shape[1])
        yield _stage(slot, self._rules.words, _spans(firsts, rules), np.concatenate(rules), 1)

    def apply(self, registry: KernelRegistry, staged: Staged, slot: Slot, stream: Any) -> None:
        """Scatter what has been uploaded."""
        for s in staged.scatters:
            indices = slot.packed[s.indices : s.indices + s.items]
            values = slot.packed[s.values : s.values + s.items * s.width]
            sampling.scatter(registry, s.target, indices, values, s.items, s.width, stream=stream)
        for h in staged.histories:
            counts = self._counts[h.row]
            counts.data.memset_async(0, counts.nbytes, stream)
            tokens = slot.packed[h.first : h.first + h.length]
            sampling.start_history(registry, self.state, h.row, tokens, h.length, h.prompt_len, stream=stream)


def _stage(slot: Slot, target: Any, indices: NDArray[np.int32], values: NDArray[np.int32], width: int) -> _Scatter:
    return _Scatter(target, slot.put(indices), slot.put(values), len(indices), width)


def _spans(firsts: Sequence[int], parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Where each element of the parts goes, a part's being consecutive."""
    spans = [np.arange(first, first + len(part)) for first, part in zip(firsts, parts, strict=True)]
    return np.concatenate(spans).astype(np.int32)
