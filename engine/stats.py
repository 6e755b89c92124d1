"""EngineStats: the engine's numbers at one moment, made between two iterations."""

from dataclasses import dataclass

from engine.counters import Counters
from engine.scheduler import Scheduler


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


def engine_stats(state: str, scheduler: Scheduler, counters: Counters) -> EngineStats:
    """Read the numbers; called in the loop's task."""
    kv = scheduler.kv
    return EngineStats(
        state=state,
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        kv_cache_usage=kv.usage,
        num_blocks=kv.num_blocks,
        num_free_blocks=kv.num_available - kv.num_cached,
        num_cached_blocks=kv.num_cached,
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        num_preemptions=scheduler.num_preemptions,
        tenants=_tenants(scheduler),
    )


def _tenants(scheduler: Scheduler) -> tuple[TenantStats, ...]:
    waiting = scheduler.waiting_by_tenant()
    running: dict[str, int] = {}
    for sequence in scheduler.running:
        running[sequence.tenant] = running.get(sequence.tenant, 0) + 1
    return tuple(
        TenantStats(tenant=name, num_running=running.get(name, 0), num_waiting=waiting.get(name, 0))
        for name in sorted(running.keys() | waiting.keys())
    )
