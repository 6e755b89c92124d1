"""Metrics as a scraper reads them, after scripted runs in a time that only the fake device moves."""

import asyncio
import gc
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import ConfigError, RequestFault, StepFault
from engine.observe.counters import Counters, Histogram, token_bounds
from engine.observe.metrics_server import MetricsServer
from engine.observe.prometheus import EngineCollector
from rpc.options import ServerOptions
from tests.engine.fake_device import FAULT, expected, hashed
from tests.engine.server import tokens_of
from tests.engine.timed import FORWARD, SAMPLE, STEP, TimedServer, parse, timed_server

ROOT = Path(__file__).parent.parent.parent
LAUNCH = FORWARD + SAMPLE
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def value(server: TimedServer, name: str) -> float:
    return server.metrics()[name]


def mean(server: TimedServer, name: str) -> tuple[float, float]:
    """Count and sum of a histogram."""
    samples = server.metrics()
    return samples[f"{name}_count"], samples[f"{name}_sum"]


async def test_latencies_of_one_request_are_exact() -> None:
    """Steps 1, 2, 3 give the tokens; the host launches the next step before it awaits one."""
    async with timed_server() as server:
        stream = server.generate([1, 2, 3], 3)
        server.clock.now += 7.0
        await server.settle()
        assert stream.request_id
        first = LAUNCH + LAUNCH + STEP
        second = first + LAUNCH + STEP
        third = second + STEP  # nothing is left to launch
        assert mean(server, "vllm:request_queue_time_seconds") == (1, 7.0)
        assert mean(server, "vllm:time_to_first_token_seconds") == (1, 7.0 + first)
        assert mean(server, "vllm:request_prefill_time_seconds") == (1, first)
        assert mean(server, "vllm:inter_token_latency_seconds") == (2, third - first)
        assert mean(server, "vllm:time_per_output_token_seconds") == (1, (third - first) / 2)
        assert mean(server, "vllm:request_decode_time_seconds") == (1, third - first)
        assert mean(server, "vllm:e2e_request_latency_seconds") == (1, 7.0 + third)
        samples = server.metrics()
        assert second - first == 11.5 and third - second == 10.0
        gaps = "vllm:inter_token_latency_seconds_bucket"
        assert samples[f"{gaps}{{le=7.5}}"] == 0
        assert samples[f"{gaps}{{le=10.0}}"] == 1
        assert samples[f"{gaps}{{le=20.0}}"] == samples[f"{gaps}{{le=+Inf}}"] == 2


async def test_a_queued_request_waits_until_its_first_step_is_decided() -> None:
    async with timed_server(max_num_seqs=1) as server:
        streams = [server.generate([1], 1), server.generate([2], 1)]
        await server.settle()
        # The second gets the row when the first one's token has settled; nothing else takes time.
        assert mean(server, "vllm:request_queue_time_seconds") == (2, 0.0 + LAUNCH + STEP)
        assert mean(server, "vllm:time_to_first_token_seconds") == (2, (LAUNCH + STEP) + 2 * (LAUNCH + STEP))
        assert len(streams) == 2


async def test_token_counts() -> None:
    async with timed_server(budget=8) as server:
        streams = [server.generate([1] * 20, 3), server.generate([2], 1)]
        await server.settle()
        samples = server.metrics()
        assert samples["vllm:prompt_tokens_total"] == 21
        assert samples["vllm:generation_tokens_total"] == 4
        assert mean(server, "vllm:request_prompt_tokens") == (2, 21)
        assert mean(server, "vllm:request_generation_tokens") == (2, 4)
        # The last token of each request is sampled and never computed.
        assert samples["vllm:iteration_tokens_total_sum"] == 21 + 2
        assert samples["vllm:iteration_tokens_total_count"] == len(server.device.plans)
        assert samples["vllm:request_success_total{finished_reason=length}"] == len(streams)


async def test_a_request_for_its_prompt_only_counts_its_prompt() -> None:
    async with timed_server() as server:
        stream = server.generate([1, 2, 3], 0)
        await server.settle()
        samples = server.metrics()
        assert samples["vllm:prompt_tokens_total"] == 3
        assert samples["vllm:generation_tokens_total"] == 0
        assert samples["vllm:time_to_first_token_seconds_count"] == 0
        assert samples["vllm:request_success_total{finished_reason=length}"] == 1
        assert stream.request_id


async def test_choices_share_a_first_token_and_count_each_gap() -> None:
    async with timed_server() as server:
        stream = server.generate([1, 2, 3], 3, n=2)
        await server.settle()
        samples = server.metrics()
        assert samples["vllm:time_to_first_token_seconds_count"] == 1
        assert samples["vllm:inter_token_latency_seconds_count"] == 4
        assert samples["vllm:generation_tokens_total"] == 6
        assert mean(server, "vllm:request_max_num_generation_tokens") == (1, 3)
        assert samples["vllm:request_time_per_output_token_seconds_count"] == 1
        assert samples["vllm:prompt_tokens_total"] == 3
        assert samples["vllm:request_success_total{finished_reason=length}"] == 1
        assert samples["vllm:time_per_output_token_seconds_sum"] == samples["vllm:request_decode_time_seconds_sum"] / 2
        assert stream.request_id


async def test_prefix_cache_counts_tokens() -> None:
    """17 tokens in blocks of 4: the second request finds 16."""
    async with timed_server() as server:
        for _ in range(2):
            stream = server.generate(list(range(17)), 1)
            await server.settle()
            assert stream.request_id
        samples = server.metrics()
        for name in ("vllm:prefix_cache", "vllm:gpu_prefix_cache"):
            assert (samples[f"{name}_queries_total"], samples[f"{name}_hits_total"]) == (34, 16)
        assert samples["vllm:prompt_tokens_cached_total"] == 16
        assert samples["vllm:prompt_tokens_cached_by_source_total{source=device}"] == 16
        by_source = {s: samples[f"vllm:prompt_tokens_by_source_total{{source={s}}}"] for s in SOURCES}
        assert by_source == {"local_compute": 17 + 1, "local_cache_hit": 16, "external_kv_transfer": 0}
        assert mean(server, "vllm:request_prefill_kv_computed_tokens") == (2, 17 + 1)


async def test_preemption_keeps_the_first_times() -> None:
    """10 blocks of 4 do not hold two sequences of 24: the younger is preempted in the middle."""
    async with timed_server(num_blocks=10) as server:
        streams = [server.generate([1] * 8, 16), server.generate([2] * 8, 16)]
        await server.settle()
        samples = server.metrics()
        assert samples["vllm:num_preemptions_total"] >= 1
        assert mean(server, "vllm:request_queue_time_seconds") == (2, 0.0)
        assert mean(server, "vllm:time_to_first_token_seconds") == (2, 2 * (2 * LAUNCH + STEP))
        # Every gap of a request, its absence included, adds up to the time from its first to its last token.
        decode = samples["vllm:request_decode_time_seconds_sum"]
        assert mean(server, "vllm:inter_token_latency_seconds") == (30, decode)
        assert samples["vllm:prefix_cache_queries_total"] == 16
        assert len(streams) == 2


async def test_gauges_follow_the_load_and_fall_to_zero() -> None:
    async with timed_server(num_blocks=16, max_num_seqs=1) as server:
        streams = [server.generate([1] * 9, 5), server.generate([2], 5)]
        await server.until(lambda: len(server.device.plans) == 2)
        samples = server.metrics()
        assert samples["vllm:num_requests_running"] == 1
        assert samples["vllm:num_requests_waiting"] == 1
        assert samples["vllm:num_requests_waiting_by_reason{reason=capacity}"] == 1
        assert samples["vllm:kv_cache_usage_perc"] == samples["vllm:gpu_cache_usage_perc"] == 3 / 16
        await server.settle()
        samples = server.metrics()
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc")
        assert [samples[f"vllm:{g}"] for g in gauges] == [0, 0, 0, 0]
        assert samples["vllm:cpu_cache_usage_perc"] == samples["engine:leaked_blocks"] == 0
        assert len(streams) == 2


async def test_who_waits_for_a_block_being_computed_is_told_from_who_waits_for_room() -> None:
    async with timed_server(num_blocks=16, max_num_seqs=4) as server:
        streams = [server.generate(prompt, 2) for prompt in ([1] * 9, [1] * 9, [2] * 9, [3] * 41)]
        await server.until(lambda: len(server.device.plans) == 1)
        samples = server.metrics()
        assert samples["vllm:num_requests_running"] == 2  # the first and the third
        assert samples["vllm:num_requests_waiting_by_reason{reason=deferred}"] == 1
        assert samples["vllm:num_requests_waiting_by_reason{reason=capacity}"] == 1
        await server.settle()
        assert server.metrics()["vllm:num_requests_waiting_by_reason{reason=deferred}"] == 0
        assert len(streams) == 4


async def test_gauges_fall_to_zero_after_aborts() -> None:
    """Running, queued and dropped; the last abort comes when nothing else would make the loop turn. Each counts once,
    however often it is asked for, and none for a request that nobody knows."""
    async with timed_server(max_num_seqs=1) as server:
        running, queued, dropped = (server.generate([i] * 9, 50) for i in range(3))
        await server.until(lambda: len(server.device.plans) == 2)
        queued.cancel()
        del dropped
        gc.collect()
        for request_id in (queued.request_id, running.request_id, running.request_id, "nobody"):
            server.inbox.abort(request_id)
        await server.settle()
        server.inbox.abort(running.request_id)
        await server.settle()
        samples = server.metrics()
        assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
        assert samples["vllm:kv_cache_usage_perc"] == 0
        assert samples["vllm:request_success_total{finished_reason=abort}"] == 3
        assert samples["vllm:request_queue_time_seconds_count"] == 1
        assert samples["vllm:e2e_request_latency_seconds_count"] == 3


async def test_a_leak_is_seen_when_idle() -> None:
    async with timed_server(num_blocks=16) as server:
        leaked = server.roster.kv.begin([[]], 9, "")
        stream = server.generate([1], 1)
        await server.settle()
        await server.until(lambda: server.observer.counters.leaked_blocks > 0)
        assert value(server, "engine:leaked_blocks") == 3
        assert leaked is not None and stream.request_id


async def test_a_failed_step_counts_as_an_error() -> None:
    async with timed_server() as server:
        server.device.faults[1] = StepFault("bad")
        stream = server.generate([1], 3)
        await server.settle()
        assert value(server, "vllm:request_success_total{finished_reason=error}") == 1
        with pytest.raises(StepFault):
            await stream.read()


async def test_a_row_without_usable_logits_counts_as_an_error_and_ends_nobody_else() -> None:
    async with timed_server() as server:
        server.device.next_token = lambda context: FAULT if context[0] == 2 and len(context) == 4 else hashed(context)
        streams = [server.generate([i, 7], 6) for i in range(4)]
        await server.settle()
        ended = "vllm:request_success_total{{finished_reason={}}}"
        samples = server.metrics()
        assert (samples[ended.format("error")], samples[ended.format("length")]) == (1, 3)
        for i, stream in enumerate(streams):
            if i != 2:
                assert await tokens_of(stream) == expected([i, 7], 6)
        with pytest.raises(RequestFault, match="finite"):
            await tokens_of(streams[2])


async def test_phases_are_seen_apart() -> None:
    async with timed_server() as server:
        stream = server.generate([1], 2)
        await server.settle()
        samples = server.metrics()
        seconds = {p: samples[f"engine:host_step_seconds_sum{{phase={p}}}"] for p in ("launch", "sample", "device")}
        assert seconds == {"launch": 2 * FORWARD, "sample": 2 * SAMPLE, "device": 2 * STEP}
        assert stream.request_id


async def test_the_number_of_series_is_constant() -> None:
    """R12: no request makes a series, whatever it is called and however it ends."""
    async with timed_server(max_num_seqs=64) as server:
        before = set(server.metrics())
        streams = []
        for i in range(200):
            name = f'{i}"}}\n{{model_name="x"}} \\ \N{SNOWMAN}' + "x" * (i % 7)
            streams.append(server.generate([i], 1 + i % 3, name))
            if i % 3 == 0:
                streams[-1].cancel()
        await server.settle()
        assert set(server.metrics()) == before
        ended = [v for k, v in server.metrics().items() if k.startswith("vllm:request_success_total")]
        assert sum(ended) == 200


async def test_names_types_and_info() -> None:
    """Names that vLLM's dashboards query, with the types they expect."""
    async with timed_server() as server:
        text = generate_latest(server.registry).decode()
    types = {f.name: f.type for f in text_string_to_metric_families(text)}
    histograms = (
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
        *("request_time_per_output_token_seconds", "request_max_num_generation_tokens"),
        *("request_prefill_kv_computed_tokens", "iteration_tokens_total"),
    )
    gauges = (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"),
        *("cpu_cache_usage_perc", "cache_config_info", "num_requests_waiting_by_reason", "engine_sleep_state"),
    )
    counters = (
        *("prompt_tokens", "generation_tokens", "num_preemptions", "request_success"),
        *("prefix_cache_queries", "prefix_cache_hits", "gpu_prefix_cache_queries", "gpu_prefix_cache_hits"),
        *("prompt_tokens_cached", "prompt_tokens_by_source", "prompt_tokens_cached_by_source"),
        *("external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits"),
    )
    assert types == {
        **{f"vllm:{name}": "histogram" for name in histograms},
        **{f"vllm:{name}": "gauge" for name in gauges},
        **{f"vllm:{name}": "counter" for name in counters},
        "engine:host_step_seconds": "histogram",
        "engine:leaked_blocks": "gauge",
    }
    assert parse(text)["vllm:cache_config_info{num_gpu_blocks=64}"] == 1


def get(port: int, **headers: str) -> tuple[str, str]:
    """Content type and text of a scrape."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.headers["Content-Type"], response.read().decode()


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/plain",
        "text/plain; version=1.0.0; escaping=allow-utf-8",
        "application/openmetrics-text",
        "application/openmetrics-text; version=1.0.0; escaping=values",
        "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited",
    ],
)
async def test_every_accept_header_gets_plain_text(accept: str) -> None:
    async with timed_server() as server:
        with MetricsServer(server.registry, "127.0.0.1", 0) as http:
            content_type, text = await asyncio.to_thread(get, http.port, Accept=accept)
        assert content_type == "text/plain; version=0.0.4; charset=utf-8"
        assert "\nvllm:num_requests_running{" in text and "# EOF" not in text
        assert parse(text) == server.metrics()


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^metrics port: cannot listen on 127.0.0.1:{port}: address already in use$"):
            MetricsServer(CollectorRegistry(), "127.0.0.1", port)


def test_the_port_is_free_when_closed() -> None:
    with MetricsServer(CollectorRegistry(), "127.0.0.1", 0) as http:
        port = http.port
    with MetricsServer(CollectorRegistry(), "127.0.0.1", port) as http:
        assert get(port)[1] == ""


async def test_gpu_utilization_is_read_where_nvml_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def utilization(handle: str) -> SimpleNamespace:
        if handle == "gpu1":
            raise RuntimeError("lost")
        return SimpleNamespace(gpu=42)

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: f"gpu{i}",
        nvmlDeviceGetUtilizationRates=utilization,
    )
    async with timed_server() as server:
        assert not [name for name in server.metrics() if "gpu_utilization" in name]
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        registry = CollectorRegistry()
        registry.register(EngineCollector(Counters(), server.scheduler, model_name="tiny", cache_config={}))
    samples = parse(generate_latest(registry).decode())
    assert {k: v for k, v in samples.items() if "gpu_utilization" in k} == {"engine:gpu_utilization{gpu=0}": 0.42}


def test_a_client_that_hangs_up_is_no_news(capfd: pytest.CaptureFixture[str]) -> None:
    with MetricsServer(CollectorRegistry(), "127.0.0.1", 0) as http:
        for request in (b"", b"GET", b"nonsense\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", http.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(request)
        assert get(http.port)[1] == ""
    assert capfd.readouterr() == ("", "")


def test_the_ports_must_differ() -> None:
    with pytest.raises(ConfigError, match=r"^port, metrics_port: both are 5000"):
        ServerOptions(port=5000, metrics_port=5000)
    assert ServerOptions(port=0, metrics_port=0).metrics_port == 0
    assert ServerOptions().metrics_port is None


def test_a_server_prints_its_metrics_port_and_answers_there() -> None:
    """Under the model's name, before the first request; both ports are free ones."""
    flags = ("--device", "cpu", "--port", "0", "--metrics-port", "0", "--kv-cache-dtype", "int8", "--no-http")
    command = [sys.executable, "-m", "engine", "serve", "tests/golden/llama", *flags]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stderr is not None
            assert child.stdout.readline().startswith("listening on 127.0.0.1:")
            words, _, port = child.stdout.readline().removesuffix("/metrics\n").rpartition(":")
            assert words == "metrics on http://127.0.0.1"
            while "serving" not in (line := child.stderr.readline()):
                assert line, "the server ended"
            content_type, text = get(int(port))
            assert content_type.startswith("text/plain; version=0.0.4")
            assert 'vllm:num_requests_running{engine="0",model_name="llama"} 0.0' in text
            assert 'block_size="16"' in text and 'cache_dtype="int8"' in text
            child.send_signal(signal.SIGTERM)
            assert child.wait(30) == 0
        finally:
            child.kill()


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for observed in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(observed)
    histogram.observe(1.25, 4)
    assert histogram.counts == [2, 6, 1]
    assert histogram.total == 12.5


def test_token_bounds() -> None:
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(99) == (1, 2, 5, 10, 20, 50)
