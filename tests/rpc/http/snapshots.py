"""Snapshots with known contents."""

from collections.abc import Sequence

import numpy as np

from engine.observe.records import IterationRecord
from engine.observe.snapshot import HistogramView, SequenceView, Snapshot
from tests.rpc.fake_engine import STATS

LATENCY = HistogramView((0.01, 0.1, 1.0), (0, 3, 1, 0), 0.53125)


def iteration(launched: int, settled: int, prefill: int, decode: int, seconds: float) -> IterationRecord:
    """One with a prefill row, if it computes prompt tokens. 0 is no step."""
    return IterationRecord(
        start=0.0, idle=0.0, phases=(seconds,), launched=launched, settled=settled, tokens=prefill + decode,
        prefill_rows=int(prefill > 0), decode_rows=decode, sampled=decode, running=1, waiting=0, kv_usage=0.5,
        kv_fill=1.0, preemptions=0, device_seconds=seconds / 2,
    )  # fmt: skip


def snapshot(blocks: Sequence[Sequence[int]] = ((0, 1, 2, 3, 2, 0),)) -> Snapshot:
    """Two rows, one request that waits, three steps of which one has not settled."""
    return Snapshot(
        stats=STATS,
        running=(
            SequenceView("acme/chatcmpl-1f0c2d3e4f5a69788796a5b4c3d2e1f0-3", 7, 0, 1, 40, 16, 50, 11, 64),
            SequenceView("short", 8, 1, 0, 40, 16, 32, 0, 64),
        ),
        waiting=(SequenceView("later", 9, 0, -1, 400, 0, 0, 0, 8),),
        windows=tuple([None, 128][: len(blocks)]),
        blocks=tuple(np.array(states, np.uint8) for states in blocks),
        iterations=(
            iteration(4, 0, 30, 0, 1.0),
            iteration(5, 4, 12, 3, 0.25),
            iteration(0, 5, 0, 0, 0.125),
            iteration(6, 0, 1, 1, 2.0),
        ),
        time_to_first_token=LATENCY,
        inter_token_latency=LATENCY,
        time_per_output_token=LATENCY,
    )
