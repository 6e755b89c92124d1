"""Snapshot: what the engine holds and does at one moment, for somebody who looks; and EngineStats, its numbers alone.

Taking one costs the loop 0.13 ms with 128 sequences and 3,000 blocks (1.4 ms with 100,000), and nothing while nobody
asks. It has no tokens and no text.
Read next: `rpc/http/state.py` (who asks).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.observe.counters import Counters, Histogram
from engine.observe.observer import Observer
from engine.observe.records import IterationRecord
from engine.schedule.roster import Roster
from engine.schedule.sequence import Sequence

MAX_SEQUENCES = 256
"""Running and waiting sequences listed, each; the stats count all of them."""
MAX_ITERATIONS = 160
"""Iterations listed, the latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """Sequences of one tenant: those with a row and those that wait for one."""

    tenant: str
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What runs and waits now, and what was done since the start.

    Attributes:
        state: as `Engine.state`.
        num_running: sequences that have a row.
        num_waiting: sequences that wait for one, new or preempted.
        kv_cache_usage: share of the KV blocks in use, in the fullest group; so are the counts of blocks.
        num_free_blocks: blocks without contents worth keeping.
        num_cached_blocks: unused blocks that the prefix cache can still serve.
        prefix_cache_queries: prompt tokens looked up in the prefix cache.
        prefix_cache_hits: prompt tokens found there.
        tenants: those with a sequence, by name.
    """

    state: str
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    tenants: tuple[TenantStats, ...]


def engine_stats(state: str, roster: Roster, counters: Counters) -> EngineStats:
    """Read the numbers; called in the loop's task."""
    kv = roster.kv
    return EngineStats(
        state=state,
        num_running=len(roster.running),
        num_waiting=roster.num_waiting,
        kv_cache_usage=kv.usage,
        num_blocks=kv.num_blocks,
        num_free_blocks=kv.num_available - kv.num_cached,
        num_cached_blocks=kv.num_cached,
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        num_preemptions=roster.num_preemptions,
        tenants=_tenants(roster),
    )


def _tenants(roster: Roster) -> tuple[TenantStats, ...]:
    waiting = roster.waiting_by_tenant()
    running: dict[str, int] = {}
    for sequence in roster.running:
        running[sequence.tenant] = running.get(sequence.tenant, 0) + 1
    return tuple(
        TenantStats(tenant=name, num_running=running.get(name, 0), num_waiting=waiting.get(name, 0))
        for name in sorted(running.keys() | waiting.keys())
    )


class SequenceView(NamedTuple):
    """A sequence from outside.

    Attributes:
        number: of its request, in order of arrival.
        choice: which of the request's choices it is.
        row: its row on the device, -1 while it waits.
        cached_tokens: the part of its prompt that the prefix cache served.
        computed_tokens: tokens whose keys and values are in the cache.
        output_tokens, max_output: tokens sampled and settled, and the most there will be.
    """

    request_id: str
    number: int
    choice: int
    row: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    max_output: int

    @classmethod
    def of(cls, sequence: Sequence) -> "SequenceView":
        """What `sequence` is now."""
        # While it decodes, num_computed moves only when a block is full.
        computed = len(sequence.token_ids) - 1 if sequence.is_decoding else sequence.num_computed
        return cls(
            sequence.request_id,
            sequence.arrival,
            sequence.index,
            sequence.row,
            sequence.prompt_len,
            sequence.num_cached_tokens,
            computed,
            sequence.num_output,
            sequence.max_output,
        )


class HistogramView(NamedTuple):
    """A histogram's numbers; as in `engine.observe.counters.Histogram`."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @classmethod
    def of(cls, histogram: Histogram) -> "HistogramView":
        """A copy."""
        return cls(histogram.bounds, tuple(histogram.counts), histogram.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One moment.

    Attributes:
        running: sequences with a row, the first in order first.
        waiting: those without one, likewise.
        windows: attention window of each KV group, None where every position is seen.
        blocks: per KV group, uint8 [num_blocks]: the state of each block, as `engine.kv.pool` numbers them.
        iterations: the latest, oldest first.
    """

    stats: EngineStats
    running: tuple[SequenceView, ...]
    waiting: tuple[SequenceView, ...]
    windows: tuple[int | None, ...]
    blocks: tuple[npt.NDArray[np.uint8], ...]
    iterations: tuple[IterationRecord, ...]
    time_to_first_token: HistogramView
    inter_token_latency: HistogramView
    time_per_output_token: HistogramView


def take_snapshot(state: str, roster: Roster, observer: Observer) -> Snapshot:
    """Copy what is there; called in the loop's task."""
    counters, kv, iterations = observer.counters, roster.kv, observer.records.iterations
    latest = list(islice(reversed(iterations), MAX_ITERATIONS))
    return Snapshot(
        stats=engine_stats(state, roster, counters),
        running=_views(roster.running),
        waiting=_views(roster.waiting()),
        windows=tuple(group.window for group in kv.groups),
        blocks=kv.block_states(),
        iterations=tuple(reversed(latest)),
        time_to_first_token=HistogramView.of(counters.time_to_first_token),
        inter_token_latency=HistogramView.of(counters.inter_token_latency),
        time_per_output_token=HistogramView.of(counters.time_per_output_token),
    )


def _views(sequences: Iterable[Sequence]) -> tuple[SequenceView, ...]:
    return tuple(SequenceView.of(sequence) for sequence in islice(sequences, MAX_SEQUENCES))
