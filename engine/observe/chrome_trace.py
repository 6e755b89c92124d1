"""Records as a Chrome trace, which Perfetto and chrome://tracing show. Format: "Trace Event Format", Google, 2016."""

from collections.abc import Iterable, Iterator
from typing import Any

from engine.observe.records import DEVICE, PHASES, IterationRecord, RequestRecord

_HOST, _DEVICE, _REQUESTS = 1, 2, 3
_LANES = {_HOST: "host", _DEVICE: "device", _REQUESTS: "requests"}
_COUNTERS = ("running", "waiting", "tokens", "kv_usage", "kv_fill")


def chrome_trace(iterations: Iterable[IterationRecord], requests: Iterable[RequestRecord] = ()) -> dict[str, Any]:
    """The records as Trace Event JSON, which Perfetto and chrome://tracing show; times in microseconds.

    Three lanes: the host's phases, the device's steps, and the requests as spans from arrival to end. A
    step's span ends when the host saw it end and is cut where it would begin before the one before it
    ended; `args.device_seconds` is what the device measured.
    """
    iterations, requests = list(iterations), list(requests)
    origin = min([i.start for i in iterations] + [r.arrival for r in requests], default=0.0)
    events = [
        {"ph": "M", "name": "process_name", "pid": lane, "tid": lane, "args": {"name": name}}
        for lane, name in _LANES.items()
    ]
    device_free = origin
    for record in iterations:
        events += _phase_events(record, origin)
        seen = record.start + sum(record.phases[: DEVICE + 1])
        if record.settled:
            start = max(device_free, seen - record.device_seconds)
            args = {"step": record.settled, "device_seconds": record.device_seconds}
            events.append(_complete(_DEVICE, f"step {record.settled}", start - origin, seen - start, args))
            device_free = seen
        counts = record._asdict()
        events += [
            {"ph": "C", "name": name, "pid": _HOST, "tid": _HOST, "ts": _us(record.start - origin),
             "args": {name: counts[name]}}
            for name in _COUNTERS
        ]  # fmt: skip
    events += [event for n, request in enumerate(requests) for event in _request_events(n, request, origin)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _phase_events(record: IterationRecord, origin: float) -> Iterator[dict[str, Any]]:
    at = record.start - origin
    for name, seconds in zip(PHASES, record.phases, strict=True):
        if seconds:
            yield _complete(_HOST, name, at, seconds, {"launched": record.launched, "settled": record.settled})
        at += seconds


def _request_events(number: int, request: RequestRecord, origin: float) -> Iterator[dict[str, Any]]:
    """A span with its parts inside. Async events: requests overlap, and each needs a row of its own."""
    parts = [
        ("queue", request.arrival, request.scheduled),
        ("prefill", request.scheduled, request.first_token),
        ("decode", request.first_token, request.last_token),
    ]
    args = {
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": request.output_tokens,
        "finish_reason": request.finish_reason,
    }
    base = {"cat": "request", "id": number, "pid": _REQUESTS, "tid": _REQUESTS}
    yield {**base, "ph": "b", "name": request.request_id, "ts": _us(request.arrival - origin), "args": args}
    for name, start, end in parts:
        if start is not None and end is not None:
            yield {**base, "ph": "b", "name": name, "ts": _us(start - origin)}
            yield {**base, "ph": "e", "name": name, "ts": _us(end - origin)}
    yield {**base, "ph": "e", "name": request.request_id, "ts": _us(request.ended - origin)}


def _complete(lane: int, name: str, start: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": lane, "tid": lane, "ts": _us(start), "dur": _us(seconds), "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
