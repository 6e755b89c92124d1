"""Spans of scripted requests, in a time that only the fake device moves."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, StepFault
from engine.observe.spans import RequestSpans
from tests.engine.timed import FORWARD, SAMPLE, STEP, TimedServer, timed_server

LAUNCH = FORWARD + SAMPLE


class Traced:
    """A server, and what it has exported."""

    def __init__(self, server: TimedServer, spans: RequestSpans, exporter: InMemorySpanExporter) -> None:
        self.server = server
        self._spans = spans
        self._exporter = exporter

    def spans(self) -> list[ReadableSpan]:
        """Every span so far, in the order in which requests ended; the last call."""
        self._spans.close()
        return list(self._exporter.get_finished_spans())


@asynccontextmanager
async def traced(**options: int) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    spans = RequestSpans("unused", exporter)
    async with timed_server(spans=partial(spans.add, model="tiny"), **options) as server:
        yield Traced(server, spans, exporter)


def seconds(span: ReadableSpan) -> dict[str, float]:
    """Its latencies."""
    assert span.attributes is not None
    prefix = "gen_ai.latency."
    items: Any = span.attributes.items()
    return {name.removeprefix(prefix): value for name, value in items if name.startswith(prefix)}


def since_start(span: ReadableSpan) -> list[tuple[str, float]]:
    """Events, and when they were; a wall clock of microseconds is behind it."""
    assert span.start_time is not None
    return [(event.name, round((event.timestamp - span.start_time) / 1e9, 3)) for event in span.events]


async def test_a_span_has_the_times_and_sizes_of_its_request() -> None:
    async with traced() as t:
        stream = t.server.generate([1, 2, 3], 3, "mine", temperature=0.5, top_p=0.9)
        t.server.clock.now += 7.0
        await t.server.settle()
        (span,) = t.spans()
    first = 2 * LAUNCH + STEP
    third = first + LAUNCH + STEP + STEP
    assert span.name == "llm_request" and span.status.status_code is StatusCode.UNSET
    assert seconds(span) == {
        "e2e": 7.0 + third, "time_in_queue": 7.0, "time_to_first_token": 7.0 + first,
        "time_in_model_prefill": first, "time_in_model_decode": third - first, "time_in_model_inference": third,
    }  # fmt: skip
    assert span.attributes is not None
    assert {n: v for n, v in span.attributes.items() if "latency" not in n} == {
        "gen_ai.request.id": "mine", "gen_ai.request.model": "tiny", "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9, "gen_ai.request.n": 1, "gen_ai.request.max_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",), "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 3,
    }  # fmt: skip
    assert span.end_time is not None and span.start_time is not None
    assert round((span.end_time - span.start_time) / 1e9, 3) == 7.0 + third
    assert since_start(span) == [("first_token", 7.0 + first)]
    assert stream.request_id == "mine"


async def test_preemption_is_an_event() -> None:
    """10 blocks of 4 do not hold two sequences of 24: the younger is preempted in the middle."""
    async with traced(num_blocks=10) as t:
        streams = [t.server.generate([1] * 8, 16, "older"), t.server.generate([2] * 8, 16, "younger")]
        await t.server.settle()
        older, younger = t.spans()
        assert t.server.roster.num_preemptions == 1 and len(streams) == 2
    assert [name for name, _ in since_start(older)] == ["first_token"]
    (_, first), (name, preempted) = since_start(younger)
    assert name == "preempted" and first < preempted < seconds(older)["e2e"]


async def test_an_abort_and_an_error_are_the_status() -> None:
    async with traced(max_num_seqs=1) as t:
        t.server.device.faults[1] = StepFault("bad step")
        streams = [t.server.generate([1], 3, "fails"), t.server.generate([2], 3, "left")]
        streams[1].cancel()
        await t.server.settle()
        by_id = {span.attributes["gen_ai.request.id"]: span for span in t.spans() if span.attributes}
        assert len(streams) == 2
    assert by_id["fails"].status.status_code is by_id["left"].status.status_code is StatusCode.ERROR
    assert by_id["fails"].status.description == "bad step"
    assert by_id["left"].status.description == "abort"
    assert seconds(by_id["left"]).keys() == {"e2e"}


def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"^otlp_traces_endpoint: needs the extra otel, pip install 'engine-llm\[ote"):
        Engine(EngineConfig(model="any", otlp_traces_endpoint="http://127.0.0.1:4317"))


def test_nothing_is_imported_when_off() -> None:
    program = (
        "import sys, engine.engine, rpc.server, rpc.http.server; print([m for m in sys.modules if 'opentel' in m])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"
