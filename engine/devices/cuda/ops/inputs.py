"""Launches of cuda_src/inputs: a step's packed words to per-row state and to the ragged batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.devices.cuda.registry import KernelRegistry, Variant

_SOURCE = "inputs/v0.cu"
_THREADS = (128,)


@dataclass(frozen=True, slots=True)
class Batch:
    """The ragged batch on the GPU; arrays are as long as the limits, a step fills a prefix.

    Attributes:
        ids, token_rows, positions: i32 [max_num_batched_tokens].
        query_start_loc: i32 [max_num_seqs + 1], first token of each entry, then their number.
        entry_rows, seq_lens: i32 [max_num_seqs], stable row of each entry, tokens in its sequence after the step.
    """

    ids: Any
    token_rows: Any
    positions: Any
    query_start_loc: Any
    entry_rows: Any
    seq_lens: Any


def variants() -> Iterator[Variant]:
    yield Variant(_SOURCE)


def apply_segments(registry: KernelRegistry, state: Any, packed: Any, first: int, count: int, *, stream: Any) -> None:
    """Copy `count` segments, listed from word `first` of `packed` as (target, source, length), to `state`."""
    if count:
        registry.get(_SOURCE, "apply_segments")((count,), _THREADS, (state, packed, np.int32(first)), stream=stream)


def expand_entries(
    registry: KernelRegistry,
    packed: Any,
    last_ids: Any,
    batch: Batch,
    entries: int,
    offsets: tuple[int, int, int, int],
    *,
    stream: Any,
) -> None:
    """Fill `batch` from the lists at `offsets` of `packed`: rows, first positions, first tokens, input ids."""
    out = (batch.ids, batch.token_rows, batch.positions, batch.query_start_loc, batch.entry_rows, batch.seq_lens)
    args = (packed, last_ids, *out, *map(np.int32, offsets))
    registry.get(_SOURCE, "expand_entries")((entries,), _THREADS, args, stream=stream)
