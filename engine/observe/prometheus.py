"""EngineCollector: the counters and the scheduler's state under the names that dashboards query.

Names, types and labels follow vLLM's; `docs/metrics.md` explains each. A scrape reads; it changes nothing and
the loop does not wait for it. Invariants: no label comes from a request, so the number of series is
constant; gauges are read when asked, so they are never stale; every engine has a registry of its own.
Read next: `engine/observe/counters.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.observe.counters import Counters, Histogram
from engine.observe.nvml import open_gpus
from engine.observe.records import PHASES
from engine.schedule.scheduler import Scheduler

LABELS = ("model_name", "engine")

_OTHER_CACHES = (
    ("external_prefix_cache_queries", "Tokens looked up in a cache outside the engine"),
    ("external_prefix_cache_hits", "Tokens found in a cache outside the engine"),
    ("mm_cache_queries", "Items looked up in a cache of images and sounds"),
    ("mm_cache_hits", "Items found in a cache of images and sounds"),
)
"""vLLM's panel of hit rates asks for these, too."""


class EngineCollector:
    """Implements prometheus_client's custom collector protocol for one engine."""

    def __init__(
        self, counters: Counters, scheduler: Scheduler, *, model_name: str, cache_config: Mapping[str, object]
    ) -> None:
        self._counters = counters
        self._scheduler = scheduler
        self._labels = (model_name, "0")
        self._cache_config = {name: str(value) for name, value in cache_config.items()}
        self._gpus = open_gpus()

    def collect(self) -> Iterator[Metric]:
        """Every family, always in the same order."""
        yield from self._gauges()
        yield from self._counts()
        yield from self._histograms()
        yield self._cache_config_info()
        if self._gpus:
            yield self._gpu_utilization()

    def _gauges(self) -> Iterator[Metric]:
        s = self._scheduler.roster
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that have a row.", len(s.running)),
            ("vllm:num_requests_waiting", "Sequences that wait for a row, new or preempted.", s.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is full.", s.kv.usage),
            ("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", s.kv.usage),
            ("vllm:cpu_cache_usage_perc", "Share of the host tier in use; there is none.", 0),
            ("engine:leaked_blocks", "KV blocks held when last idle; not 0 is a bug.", self._counters.leaked_blocks),
        ):
            family = GaugeMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        deferred = min(self._scheduler.num_deferred, s.num_waiting)
        waiting = {"capacity": s.num_waiting - deferred, "deferred": deferred}
        yield self._by(GaugeMetricFamily, "vllm:num_requests_waiting_by_reason", "Why they wait.", "reason", waiting)
        # The engine has no sleep mode.
        sleep = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._by(GaugeMetricFamily, "vllm:engine_sleep_state", "Always awake.", "sleep_state", sleep)

    def _counts(self) -> Iterator[Metric]:
        c = self._counters
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of requests whose prompt is computed.", c.prompt_tokens),
            ("vllm:generation_tokens", "Tokens sampled.", c.generation_tokens),
            ("vllm:num_preemptions", "Sequences preempted.", self._scheduler.roster.num_preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", c.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", c.prefix_cache_hits),
            ("vllm:gpu_prefix_cache_queries", "Older name of vllm:prefix_cache_queries.", c.prefix_cache_queries),
            ("vllm:gpu_prefix_cache_hits", "Older name of vllm:prefix_cache_hits.", c.prefix_cache_hits),
            ("vllm:prompt_tokens_cached", "Part of vllm:prompt_tokens that was cached.", c.prompt_tokens_cached),
            *((f"vllm:{name}", f"{text}; there is none.", 0) for name, text in _OTHER_CACHES),
        ):
            family = CounterMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        computed, cached = c.prompt_tokens - c.prompt_tokens_cached, c.prompt_tokens_cached
        sources = {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": 0}
        for name, text, label, values in (
            ("vllm:prompt_tokens_by_source", "vllm:prompt_tokens, by where they came from.", "source", sources),
            ("vllm:prompt_tokens_cached_by_source", "The cached ones, by tier.", "source", {"device": cached}),
            ("vllm:request_success", "Requests ended, by reason.", "finished_reason", c.ended),
        ):
            yield self._by(CounterMetricFamily, name, text, label, values)

    def _histograms(self) -> Iterator[Metric]:
        c = self._counters
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", c.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Gap between tokens of a choice.", c.inter_token_latency),
            ("vllm:time_per_output_token_seconds", "A request's mean gap.", c.time_per_output_token),
            ("vllm:request_time_per_output_token_seconds", "A request's mean gap.", c.time_per_output_token),
            ("vllm:e2e_request_latency_seconds", "Arrival to end.", c.e2e_latency),
            ("vllm:request_queue_time_seconds", "Arrival to first scheduled.", c.queue_time),
            ("vllm:request_prefill_time_seconds", "First scheduled to first token.", c.prefill_time),
            ("vllm:request_decode_time_seconds", "First to last token.", c.decode_time),
            ("vllm:request_prompt_tokens", "Prompt tokens of a request.", c.request_prompt_tokens),
            ("vllm:request_generation_tokens", "Tokens sampled for a request.", c.request_generation_tokens),
            ("vllm:request_max_num_generation_tokens", "Tokens of a request's longest choice.", c.longest_choice),
            ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens not found cached.", c.computed_prompt_tokens),
            ("vllm:iteration_tokens_total", "Tokens computed by a step.", c.iteration_tokens),
        ):
            yield histogram_family(name, text, LABELS, [(self._labels, histogram)])
        phases = [((*self._labels, phase), h) for phase, h in zip(PHASES, c.host_step, strict=True)]
        yield histogram_family("engine:host_step_seconds", "Phases of an iteration.", (*LABELS, "phase"), phases)

    def _by(
        self, family_of: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, label: str,
        values: Mapping[str, float],
    ) -> Metric:  # fmt: skip
        """A family with one more label."""
        family = family_of(name, text, labels=(*LABELS, label))
        for value, number in values.items():
            family.add_metric((*self._labels, value), number)
        return family

    def _cache_config_info(self) -> Metric:
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is set up; always 1.", labels=(*LABELS, *self._cache_config)
        )
        info.add_metric((*self._labels, *self._cache_config.values()), 1)
        return info

    def _gpu_utilization(self) -> Metric:
        family = GaugeMetricFamily("engine:gpu_utilization", "Share of time busy, by NVML.", labels=(*LABELS, "gpu"))
        for index, utilization in self._gpus.items():
            # A reading that fails leaves its series out, not the scrape.
            with suppress(Exception):
                family.add_metric((*self._labels, str(index)), utilization())
        return family


def histogram_family(
    name: str, text: str, labels: tuple[str, ...], children: Iterable[tuple[tuple[str, ...], Histogram]]
) -> Metric:
    """A family of the histograms of `children`, each with the values of `labels`."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in children:
        bounds = [*map(str, histogram.bounds), "+Inf"]
        family.add_metric(values, [*zip(bounds, accumulate(histogram.counts), strict=True)], histogram.total)
    return family
