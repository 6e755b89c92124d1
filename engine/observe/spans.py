"""RequestSpans: one OpenTelemetry span per request, sent to a collector over OTLP.

A span is made when its request has left, from the times that the observer noted, so a running request pays nothing.
Invariants: without `otlp_traces_endpoint` nothing of OpenTelemetry is imported; what is sent waits in a queue of at
most 2,048 spans (OTEL_BSP_MAX_QUEUE_SIZE) for a thread of its own, and is dropped when that is full: a collector
that is slow or gone holds nothing up. Names of attributes are vLLM's. Read next: `rpc/trace_context.py`.
"""

import os
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.network import is_loopback
from engine.observe.records import RequestRecord
from engine.serving.live_request import LiveRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACE_HEADERS: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)
"""`traceparent` and `tracestate` of the call that is being served; never set unless requests are traced."""

CLOSE_SECONDS = 2.0
"""How long the last spans may take to leave."""


class RequestSpans:
    """Makes spans in the loop's task. Raises ConfigError without the extra `otel`."""

    def __init__(self, endpoint: str, exporter: "SpanExporter | None" = None) -> None:
        """`endpoint` is a URL, or HOST:PORT without TLS; `exporter` takes the place of OTLP over gRPC."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            needs = f"needs the extra otel, pip install 'engine-llm[otel]' ({error})"
            raise ConfigError(f"otlp_traces_endpoint: {needs}") from error
        self._api = trace
        self._read_headers = TraceContextTextMapPropagator().extract
        insecure = None if "://" in endpoint else True
        options: Any = (("grpc.enable_http_proxy", 0),) if is_loopback(endpoint) else None
        self._exporter = exporter or OTLPSpanExporter(endpoint, insecure=insecure, channel_options=options)
        name = os.environ.get("OTEL_SERVICE_NAME", "engine-llm")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("engine")

    def add(self, record: RequestRecord, live: LiveRequest, *, model: str) -> None:
        """Queue the span of a request that ends now."""
        since_1970 = time.time() - record.ended

        def moment(at: float) -> int:
            return round((since_1970 + at) * 1e9)

        span = self._tracer.start_span(
            "llm_request",
            context=self._read_headers(live.trace_headers or {}),
            kind=self._api.SpanKind.SERVER,
            start_time=moment(record.arrival),
            attributes=_attributes(record, live, model),
        )
        if record.first_token is not None:
            span.add_event("first_token", timestamp=moment(record.first_token))
        for at in live.times.preempted:
            span.add_event("preempted", timestamp=moment(at))
        if record.finish_reason in ("error", "abort"):
            span.set_status(self._api.StatusCode.ERROR, str(live.channel.error or record.finish_reason))
        span.end(moment(record.ended))

    def close(self) -> None:
        """Send what is queued, for at most CLOSE_SECONDS; blocks."""
        # force_flush heeds no limit; a collector that is gone would hold it for the exporter's 10 s.
        flushing = threading.Thread(target=self._provider.force_flush, name="last-spans", daemon=True)
        flushing.start()
        flushing.join(CLOSE_SECONDS)
        self._exporter.shutdown()  # ends its retries
        self._provider.shutdown()


def _attributes(record: RequestRecord, live: LiveRequest, model: str) -> dict[str, Any]:
    params = live.sequences[0].params
    attributes: dict[str, Any] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.response.finish_reasons": (record.finish_reason,),
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "gen_ai.latency.e2e": record.ended - record.arrival,
    }
    for name, start, end in (
        ("time_in_queue", record.arrival, record.scheduled),
        ("time_to_first_token", record.arrival, record.first_token),
        ("time_in_model_prefill", record.scheduled, record.first_token),
        ("time_in_model_decode", record.first_token, record.last_token),
        ("time_in_model_inference", record.scheduled, record.last_token),
    ):
        if start is not None and end is not None:
            attributes[f"gen_ai.latency.{name}"] = end - start
    return {name: value for name, value in attributes.items() if value is not None}
