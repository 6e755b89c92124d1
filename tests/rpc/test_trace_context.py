"""Spans of a real engine at a collector: OTLP over gRPC, with the trace that the caller's headers name."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from engine.engine import Engine
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.proto.engine.v1 import engine_pb2_grpc as pb_grpc
from tests.rpc.conftest import Served, Serving
from tests.rpc.real import engine_config, make_checkpoint

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans, and keeps them."""

    def __init__(self) -> None:
        self.port = 0
        self.services: set[str] = set()
        self._spans: Queue[Span] = Queue()

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            self.services |= {a.value.string_value for a in group.resource.attributes if a.key == "service.name"}
            for scope in group.scope_spans:
                for span in scope.spans:
                    self._spans.put(span)
        return trace_service_pb2.ExportTraceServiceResponse()

    async def next_span(self) -> Span:
        return await asyncio.to_thread(self._spans.get, timeout=30)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # the default keeps spans for 5 s
    server = grpc.server(ThreadPoolExecutor(1))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector
    server.stop(None).wait()


@asynccontextmanager
async def traced(serving: Serving, folder: Path, endpoint: str) -> AsyncIterator[Served]:
    engine = Engine(engine_config(make_checkpoint(folder), otlp_traces_endpoint=endpoint))
    async with serving(engine, http_port=0) as served:
        yield served


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "") for a in span.attributes}


def request(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="mine",
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=pb.SamplingParams(temperature=0, ignore_eos=True, **sampling),
    )


@asynccontextmanager
async def stub(served: Served) -> AsyncIterator["pb_grpc.EngineAsyncStub"]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        yield pb_grpc.EngineStub(channel)


async def test_a_grpc_call_hands_its_trace_on(serving: Serving, tmp_path: Path, collector: Collector) -> None:
    async with traced(serving, tmp_path, f"127.0.0.1:{collector.port}") as served, stub(served) as engine:
        async for _ in engine.Generate(request(max_tokens=4), metadata=tuple(HEADERS.items())):
            pass
        span = await collector.next_span()
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=1")
    assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    found = attributes(span)
    assert found["gen_ai.request.id"] == "mine" and found["gen_ai.request.model"] == tmp_path.name
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 4)
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert [event.name for event in span.events] == ["first_token"]
    assert collector.services == {"engine-llm"}


async def test_an_http_call_hands_its_trace_on(serving: Serving, tmp_path: Path, collector: Collector) -> None:
    async with (
        traced(serving, tmp_path, f"http://127.0.0.1:{collector.port}") as served,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.server.http_port}") as client,
    ):
        body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
        (await client.post("/v1/completions", json=body, headers=HEADERS)).raise_for_status()
        (await client.post("/v1/completions", json=body)).raise_for_status()
        given, own = await collector.next_span(), await collector.next_span()
    assert (given.trace_id.hex(), given.parent_span_id.hex()) == (TRACE, PARENT)
    assert own.trace_id.hex() != TRACE and own.parent_span_id == b""


async def test_a_caller_that_leaves_is_an_error_of_the_span(
    serving: Serving, tmp_path: Path, collector: Collector
) -> None:
    async with traced(serving, tmp_path, f"127.0.0.1:{collector.port}") as served, stub(served) as engine:
        call = engine.Generate(request(max_tokens=4000), metadata=tuple(HEADERS.items()))
        await anext(aiter(call))
        call.cancel()
        span = await collector.next_span()
    assert span.trace_id.hex() == TRACE
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "abort")


async def test_a_collector_that_is_gone_disturbs_nobody(serving: Serving, tmp_path: Path) -> None:
    with socket.socket() as reserved:  # bound, and nobody listens
        reserved.bind(("127.0.0.1", 0))
        async with (
            traced(serving, tmp_path, f"127.0.0.1:{reserved.getsockname()[1]}") as served,
            stub(served) as engine,
        ):
            for _ in range(3):
                ids = [i async for r in engine.Generate(request(max_tokens=4)) for d in r.deltas for i in d.token_ids]
                assert len(ids) == 4
