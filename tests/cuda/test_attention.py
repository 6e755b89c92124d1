"""Paged attention on the CPU executor: every version against float64, bits across kernels and schedules, traffic."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.devices.cuda.ops import attention
from engine.devices.cuda.ops.attention import AttentionPlan, max_partials, paged_attention, plan_attention
from tests.cuda.kernels import SCHEDULES, CpuRegistry, element_dtype
from tests.cuda.paged import Batch, Config, make_batch, reference
from tests.gpu_without_gpu.executor import poisoned

BF16, F16 = element_dtype("bfloat16"), element_dtype("float16")

CONFIGS = (
    Config(64, BF16, False, heads=4, kv_heads=1),
    Config(80, F16, False, heads=3, kv_heads=1, block_size=12),
    Config(96, F16, True, heads=2, kv_heads=2, block_size=4),
    Config(128, BF16, True, heads=8, kv_heads=1),
    Config(256, BF16, False, heads=2, kv_heads=1, block_size=32),
)
SMALL = CONFIGS[0]
ALL_CONFIGS = tuple(
    Config(head_dim, dtype, kv_int8, heads=6, kv_heads=2)
    for head_dim in (64, 80, 96, 128, 256)
    for dtype in (BF16, F16)
    for kv_int8 in (False, True)
)

MIXED = [(1, 300), (21, 21), (1, 16), (5, 261), (1, 257), (24, 530)]
EDGES = [(1, n) for n in (1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 512, 513)]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "all": {"window": 270, "soft_cap": 1.5, "sinks": True},
}


def attend(
    registry: CpuRegistry, batch: Batch, plan: AttentionPlan | None = None, *, partials: int = 64, **options: Any
) -> NDArray[Any]:
    """[tokens, heads * head_dim] by the kernels that the plan picks."""
    out = poisoned(batch.queries.shape, batch.config.dtype)
    paged_attention(
        registry, batch.queries, batch.pages, batch.block_table, batch.ragged, plan or batch.plan(),
        batch.partials(partials), out, scale=batch.config.head_dim**-0.5, stream=None, **options,
    )  # fmt: skip
    return out


def with_sinks(config: Config, options: dict[str, Any]) -> dict[str, Any]:
    """`sinks: True` becomes a logit per head, some above all others and some far below."""
    if not options.get("sinks"):
        return options | {"sinks": None}
    return options | {"sinks": np.linspace(-6, 6, config.heads, dtype=np.float32)}


def check(registry: CpuRegistry, config: Config, entries: list[tuple[int, int]], options: dict[str, Any]) -> None:
    options = with_sinks(config, options)
    batch = make_batch(config, entries, window=options.get("window", 0))
    expected, bound = reference(batch, scale=config.head_dim**-0.5, **options)
    error = np.abs(attend(registry, batch, **options).astype(np.float64) - expected)
    assert (error <= bound).all(), float((error / bound).max())


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return bool((a.view(np.uint16) == b.view(np.uint16)).all())


def only_v0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_V1_HEAD_DIMS", ())


@pytest.mark.cuda
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_mixed_batch(config: Config, options: dict[str, Any]) -> None:
    registry = CpuRegistry()
    check(registry, config, MIXED, options)
    assert {name for name, _ in registry.reports} == {
        "attention_v1_prefill", "attention_v1_decode", "attention_v1_merge",
    }  # fmt: skip


@pytest.mark.cuda_all
@pytest.mark.parametrize("config", ALL_CONFIGS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("arch", ["compute_80", "compute_90", "compute_100", "compute_120"])
def test_mixed_batch_of_every_kernel(config: Config, options: dict[str, Any], arch: str) -> None:
    check(CpuRegistry(arch), config, MIXED, options)


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ["compute_90", "compute_120"])
def test_other_architectures(arch: str) -> None:
    check(CpuRegistry(arch), SMALL, MIXED, OPTIONS["all"])


@pytest.mark.cuda
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_version_0(config: Config, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    only_v0(monkeypatch)
    registry = CpuRegistry()
    check(registry, config, [(1, 40), (5, 9), (1, 130), (2, 2)], options)
    assert {name for name, _ in registry.reports} == {"attention_v0"}


@pytest.mark.cuda
def test_head_dim_that_only_version_0_knows() -> None:
    check(CpuRegistry(), Config(40, BF16, False, heads=2, kv_heads=1), [(1, 20), (3, 7)], {})


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [2, 6, 16, 40], ids=lambda heads: f"{heads}:2")
def test_ratios_of_heads(heads: int) -> None:
    """1, 3, 8 and 20 query heads to a KV head; 20 rows are more than one mma holds."""
    check(CpuRegistry(), replace(SMALL, heads=heads, kv_heads=2), [(1, 33), (9, 40), (1, 290)], OPTIONS["all"])


@pytest.mark.cuda
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_lengths_at_edges_of_blocks_tiles_and_splits(options: dict[str, Any]) -> None:
    check(CpuRegistry(), SMALL, EDGES, options)
    check(CpuRegistry(), SMALL, [(min(3, length), length) for _, length in EDGES], options)


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int) -> None:
    random = np.random.default_rng(seed)
    seq_lens = random.integers(1, 330, 9)
    counts = np.where(random.random(9) < 0.5, 1, np.minimum(seq_lens, random.integers(1, 40, 9)))
    config = replace(CONFIGS[seed % 2 * 3], heads=8, kv_heads=int(random.choice([1, 2, 4, 8])))
    options = {
        "window": int(random.choice([0, 1, 40, 256])),
        "soft_cap": float(random.choice([0.0, 3.0])),
        "sinks": bool(random.integers(2)),
    }
    check(CpuRegistry(), config, [(int(n), int(s)) for n, s in zip(counts, seq_lens, strict=True)], options)


@pytest.mark.cuda
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]], ids=str)
def test_every_schedule_gives_the_same_bits(config: Config) -> None:
    registry, results = CpuRegistry(), []
    batch = make_batch(config, [(1, 270), (37, 70), (1, 20)])
    for registry.schedule in SCHEDULES:
        results.append(attend(registry, batch))
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.cuda
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_decode_and_prefill_give_the_same_bits(config: Config, options: dict[str, Any]) -> None:
    """The same batch by prefill alone, by decode alone, and with splits dealt to fewer blocks."""
    options = with_sinks(config, options)
    batch = make_batch(config, [(1, 300), (5, 261), (1, 257), (12, 530)], window=options.get("window", 0))
    tokens, registry = len(batch.queries), CpuRegistry()
    plans = {
        "mixed": batch.plan(),
        "prefill": AttentionPlan(tokens, 4, decode_tokens=0, chunks=True, splits=0),
        "decode": AttentionPlan(tokens, 4, decode_tokens=12, chunks=False, splits=3),
        "few blocks": AttentionPlan(tokens, 4, decode_tokens=12, chunks=False, splits=2),
    }
    results = {name: attend(registry, batch, plan, **options) for name, plan in plans.items()}
    assert not np.isnan(results["mixed"].astype(np.float32)).any()
    for name, result in results.items():
        assert same_bits(results["mixed"], result), name


@pytest.mark.cuda
@pytest.mark.parametrize("window", [0, 90])
def test_a_token_has_one_result_however_its_prompt_is_cut(window: int) -> None:
    """290 tokens of one sequence: whole, in chunks beside each other, and the last ones by decoding."""
    registry, length = CpuRegistry(), 290

    def run(cuts: list[int]) -> NDArray[Any]:
        ends = [*cuts, length]
        entries = [(end - start, end) for start, end in zip([0, *cuts], ends, strict=True)]
        batch = make_batch(SMALL, [(length, length)], window=window)
        starts = np.array([0, *ends], np.int32)
        ragged = replace(
            batch.ragged,
            query_start_loc=starts,
            entry_rows=np.repeat(batch.ragged.entry_rows, len(entries)),
            seq_lens=np.array(ends, np.int32),
        )
        counts = np.diff(starts).astype(np.int32)
        return attend(
            registry, replace(batch, ragged=ragged, num_tokens=counts, seq_lens=ragged.seq_lens), window=window
        )

    whole = run([])
    assert same_bits(whole, run([7, 16, 150]))
    assert same_bits(whole, run([100, *range(250, length)]))


@pytest.mark.cuda
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=str)
def test_decode_reads_keys_and_values_once(config: Config) -> None:
    registry = CpuRegistry()
    batch = make_batch(config, [(1, 700), (1, 333)])
    attend(registry, batch)
    reports = dict(registry.reports)
    assert set(reports) == {"attention_v1_decode", "attention_v1_merge"}
    item = 1 if config.kv_int8 else 2
    once = 1033 * config.kv_heads * config.head_dim * item
    for argument in (1, 2):
        assert once <= reports["attention_v1_decode"].arrays[argument].loaded <= 1.05 * once


@pytest.mark.cuda
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3], CONFIGS[4]], ids=str)
def test_shared_memory_has_no_bank_conflicts(config: Config) -> None:
    """Copies of 80 and 96 wide heads have some: their rows end inside a group of 8 chunks."""
    registry = CpuRegistry()
    registry.profile = True
    attend(registry, make_batch(config, [(1, 300), (40, 300)]))
    profiles = {name: report.profile for name, report in registry.reports}
    for name in ("attention_v1_prefill", "attention_v1_decode"):
        profile = profiles[name]
        assert profile is not None and profile.shared_accesses > 0
        assert profile.bank_conflicts == 0, name


@pytest.mark.cuda
def test_window_is_all_that_is_read() -> None:
    registry = CpuRegistry()
    batch = make_batch(SMALL, [(1, 700)], window=64)
    attend(registry, batch, window=64)
    assert dict(registry.reports)["attention_v1_decode"].arrays[1].loaded == 64 * SMALL.head_dim * 2


@pytest.mark.cuda
def test_without_room_for_partials_prefill_does_it_all() -> None:
    registry = CpuRegistry()
    batch = make_batch(SMALL, [(1, 300), (1, 20)])
    plan = batch.plan(partials=2)
    assert plan == AttentionPlan(2, 2, decode_tokens=0, chunks=True, splits=0)
    assert same_bits(attend(registry, batch, plan, partials=1), attend(registry, batch))


@pytest.mark.cuda
def test_plan_counts_splits_of_single_tokens() -> None:
    plan = plan_attention(np.array([1, 9, 1], np.int32), np.array([256, 2000, 257], np.int32), partials=3)
    assert plan == AttentionPlan(11, 3, decode_tokens=1, chunks=True, splits=2)
    alone = plan_attention(np.array([1], np.int32), np.array([5], np.int32), partials=3)
    assert alone == AttentionPlan(1, 1, decode_tokens=1, chunks=False, splits=1)


@pytest.mark.cuda
def test_room_for_partials_is_bounded() -> None:
    assert max_partials(8, 1000) == 32
    assert max_partials(4096, 1 << 20) == 4096


@pytest.mark.cuda
def test_nothing_is_launched_for_no_tokens() -> None:
    registry = CpuRegistry()
    batch = make_batch(SMALL, [(1, 5)])
    empty = plan_attention(np.array([], np.int32), np.array([], np.int32), partials=4)
    attend(registry, batch, empty)
    assert not registry.reports
