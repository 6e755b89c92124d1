"""/state: what the engine holds and does now, as JSON for the page; `docs/page.md` lists the fields.

It is open, as /metrics is: it has counts and lengths, no text and no tokens, and with API keys no request's id
either, since a caller chooses ids. Invariant: however many look, a snapshot is taken at most every MIN_INTERVAL.
"""

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.kv.pool import CACHED, FREE, SHARED, USED
from engine.observe.model_info import ModelInfo
from engine.observe.records import IterationRecord
from engine.observe.snapshot import HistogramView, SequenceView, Snapshot
from rpc.calls import loaded
from rpc.clock import Clock
from rpc.http.fields import Fields
from rpc.http.service import Service

MIN_INTERVAL = 0.2
MAX_CELLS = 4096
"""Cells of a block map. A larger pool has several blocks in a cell, which shows the state of most of them."""
MAX_ID = 20

_LETTERS = np.zeros(4, "S1")
_LETTERS[[FREE, CACHED, USED, SHARED]] = [b"f", b"c", b"u", b"s"]


class LiveState:
    """The latest snapshot as JSON, for everybody who asks while it is fresh."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken_at = 0.0
        self._taking: asyncio.Task[bytes] | None = None

    async def __call__(self, service: Service, fields: Fields) -> ASGIApp:
        """The endpoint's handler. Raises EngineStopped."""
        now = self._clock.now()
        if self._taking is None or (self._taking.done() and now - self._taken_at >= MIN_INTERVAL):
            self._taken_at = now
            self._taking = asyncio.create_task(_take(service, now))
        # One caller that leaves must not take it from the others.
        body = await asyncio.shield(self._taking)
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


async def _take(service: Service, now: float) -> bytes:
    engine = loaded(service.engine)
    snapshot = await engine.snapshot()
    return json.dumps(
        state_of(snapshot, engine.info, time=now, with_ids=service.keys is None), separators=(",", ":")
    ).encode()


def state_of(snapshot: Snapshot, info: ModelInfo, *, time: float, with_ids: bool) -> dict[str, Any]:
    """The document. `time` is in seconds, since any moment."""
    stats = snapshot.stats
    return {
        "time": time,
        "state": stats.state,
        "model": {
            "name": info.served_model_name,
            "device": info.device,
            "dtype": info.dtype,
            "max_model_len": info.max_model_len,
            "version": info.version,
        },
        "needs_key": not with_ids,
        "totals": {
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "preemptions": stats.num_preemptions,
        },
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "running": [_sequence(view, with_ids) for view in snapshot.running],
        "waiting": [_sequence(view, with_ids) for view in snapshot.waiting],
        "kv_cache_usage": stats.kv_cache_usage,
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "block_groups": [
            {"window": window, **_block_map(states)}
            for window, states in zip(snapshot.windows, snapshot.blocks, strict=True)
        ],
        "steps": _steps(snapshot.iterations),
        "latency": {
            "time_to_first_token": _histogram(snapshot.time_to_first_token),
            "inter_token_latency": _histogram(snapshot.inter_token_latency),
            "time_per_output_token": _histogram(snapshot.time_per_output_token),
        },
    }


def _sequence(view: SequenceView, with_id: bool) -> dict[str, Any]:
    fields = view._asdict()
    request_id = fields.pop("request_id")
    return {"id": _short(request_id) if with_id else None, **fields}


def _short(request_id: str) -> str:
    return request_id if len(request_id) <= MAX_ID else f"{request_id[:12]}…{request_id[-7:]}"


def _block_map(states: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Counts by state, and the cells as a letter each: free, cached, used, shared."""
    free, cached, used, shared = (int(n) for n in np.bincount(states, minlength=4))
    per_cell = -(-len(states) // MAX_CELLS)
    if per_cell > 1:
        starts = np.arange(0, len(states), per_cell)
        states = np.argmax([np.add.reduceat(states == s, starts, dtype=int) for s in range(4)], axis=0)
    cells = _LETTERS[states].tobytes().decode()
    return {
        "free": free, "cached": cached, "used": used, "shared": shared, "blocks_per_cell": per_cell, "cells": cells
    }  # fmt: skip


def _steps(records: Sequence[IterationRecord]) -> dict[str, list[float]]:
    """Columns, oldest first, of the steps that have settled: each with the iteration that waited for it."""
    ends = {record.settled: record for record in records}
    steps = [(record, ends[record.launched]) for record in records if record.launched in ends and record.launched]
    return {
        "step": [launch.launched for launch, _ in steps],
        "prefill_tokens": [launch.tokens - launch.decode_rows for launch, _ in steps],
        "decode_tokens": [launch.decode_rows for launch, _ in steps],
        "rows": [launch.prefill_rows + launch.decode_rows for launch, _ in steps],
        "milliseconds": _milliseconds(end.seconds for _, end in steps),
        "device_milliseconds": _milliseconds(end.device_seconds for _, end in steps),
    }


def _milliseconds(seconds: Iterable[float]) -> list[float]:
    return [round(1e3 * s, 3) for s in seconds]


def _histogram(histogram: HistogramView) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts, "sum": round(histogram.total, 6)}
