"""Keys and values into pages, and blocks from place to place, on the CPU executor against NumPy."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.devices.cuda.ops.kv import Pages, copy_blocks, gather_blocks, rope_and_cache, scatter_blocks
from tests.cuda.kernels import SCHEDULES, CpuRegistry, element_dtype
from tests.cuda.paged import FAR, Config
from tests.gpu_without_gpu.executor import poisoned

pytestmark = pytest.mark.cuda

BF16, F16 = element_dtype("bfloat16"), element_dtype("float16")

CONFIGS = (
    Config(64, BF16, False, heads=3, kv_heads=1),
    Config(64, BF16, True, heads=3, kv_heads=1),
    Config(80, F16, True, heads=2, kv_heads=2, block_size=4),
    Config(96, F16, False, heads=2, kv_heads=1, block_size=8),
    Config(128, BF16, True, heads=4, kv_heads=2),
    Config(256, BF16, True, heads=1, kv_heads=1, block_size=32),
)
POSITIONS = np.array([0, 5, 15, 16, 17, -1, 40, 41, 63, -1], np.int32)
ROWS = np.array([2, 2, 2, 2, 2, 0, 0, 0, 1, 1], np.int32)
EPS = 1e-6
POISON = 0xFF


class Step:
    """Ten tokens of three rows, two of them padding, before and after the kernel."""

    def __init__(self, config: Config, *, norms: bool, seed: int = 3) -> None:
        random = np.random.default_rng(seed)
        self.config, size = config, config.head_dim
        per_row = 64 // config.block_size
        num_blocks = 3 * per_row + 2
        shape = (4, num_blocks, config.kv_heads, config.block_size, size)
        self.pool = poisoned(shape, np.int8 if config.kv_int8 else config.dtype)
        self.scales = poisoned(shape[:-1], np.float32) if config.kv_int8 else None
        self.pages = Pages.of(self.pool, self.scales, 1)
        self.table = np.full((4, per_row + 1), FAR, np.int32)
        self.table[:3, :per_row] = random.permutation(num_blocks)[: 3 * per_row].reshape(3, per_row)
        width = (config.heads + 2 * config.kv_heads) * size
        self.qkv = random.standard_normal((len(POSITIONS), width)).astype(config.dtype)
        self.rope = random.standard_normal((64, size)).astype(np.float32)
        self.norms = tuple(random.standard_normal((2, size)).astype(np.float32)) if norms else ()
        self.queries = poisoned((len(POSITIONS), config.heads * size), config.dtype)

    def run(self, registry: CpuRegistry) -> None:
        rope_and_cache(
            registry, self.qkv, self.rope, self.pages, self.table, ROWS, POSITIONS, self.queries, len(POSITIONS),
            norms=self.norms, eps=EPS, stream=None,
        )  # fmt: skip

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Queries, keys and values [tokens, heads, head_dim] in float64, before they are rounded."""
        config = self.config
        x = self.qkv.astype(np.float64).reshape(len(POSITIONS), -1, config.head_dim)
        queries, keys, values = np.split(x, [config.heads, config.heads + config.kv_heads], axis=1)
        if self.norms:
            queries, keys = (_norm(a, w) for a, w in zip((queries, keys), self.norms, strict=True))
        return self._rotate(queries), self._rotate(keys), values

    def _rotate(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        cos, sin = np.split(self.rope[np.maximum(POSITIONS, 0)].astype(np.float64)[:, None], 2, axis=-1)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def slots(self) -> list[tuple[int, int, int]]:
        """(token, block, slot) of the tokens that are not padding."""
        size = self.config.block_size
        tokens = [(t, int(row), int(p)) for t, (row, p) in enumerate(zip(ROWS, POSITIONS, strict=True)) if p >= 0]
        return [(t, int(self.table[row, p // size]), p % size) for t, row, p in tokens]


def _bytes(x: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(x).view(np.uint8)


def _norm(x: NDArray[np.float64], weight: NDArray[np.float32]) -> NDArray[np.float64]:
    root: NDArray[np.float64] = np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    return x / root * weight


def _close(actual: NDArray[Any], expected: NDArray[np.float64]) -> bool:
    """Equal but for one rounding to the element type and float32 noise before it."""
    half_unit = 2.0**-8 if actual.dtype == BF16 else 2.0**-11
    return bool((np.abs(actual.astype(np.float64) - expected) <= half_unit * np.abs(expected) * 1.01 + 1e-5).all())


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_queries_and_pages(config: Config, norms: bool) -> None:
    step = Step(config, norms=norms)
    step.run(CpuRegistry())
    queries, keys, values = step.expected()
    real = POSITIONS >= 0
    assert _close(step.queries.reshape(queries.shape)[real], queries[real])
    for page, scales, expected in (
        (step.pages.keys, step.pages.key_scales, keys),
        (step.pages.values, step.pages.value_scales, values),
    ):
        for token, block, slot in step.slots():
            stored = page[block, :, slot]
            if scales is None:
                assert _close(stored, expected[token])
                continue
            absmax = np.abs(expected[token]).max(-1)
            assert np.allclose(scales[block, :, slot], absmax / 127, rtol=1e-6)
            # Half a step of the quantization, and float32 noise of what was quantized.
            error = np.abs(stored * scales[block, :, slot, None].astype(np.float64) - expected[token])
            assert (error <= absmax[:, None] * (0.5 / 127 + 1e-5)).all()
            assert (np.abs(stored.astype(int)).max(-1) == 127).all()
    untouched = np.ones(step.pool.shape[1:4:2], np.bool_)
    untouched[*np.array([place[1:] for place in step.slots()]).T] = False
    assert (_bytes(step.pool[2:].swapaxes(2, 3)[:, untouched]) == POISON).all()
    assert (_bytes(step.pool[:2]) == POISON).all()
    assert (_bytes(step.queries[~real]) == POISON).all()
    if step.scales is not None:
        assert np.isnan(step.scales[2:].swapaxes(2, 3)[:, untouched]).all()


@pytest.mark.parametrize("arch", ["compute_90", "compute_120"])
def test_other_architectures_write_the_same_bits(arch: str) -> None:
    steps = [Step(CONFIGS[1], norms=True), Step(CONFIGS[1], norms=True)]
    for step, name in zip(steps, ("compute_80", arch), strict=True):
        step.run(CpuRegistry(name))
    first, second = steps
    assert (first.pool == second.pool).all()
    assert (first.queries.view(np.uint16) == second.queries.view(np.uint16)).all()


def test_int8_is_the_nearest_step_bit_for_bit() -> None:
    """Values are not rotated: what is quantized is known exactly."""
    step = Step(CONFIGS[1], norms=False)
    step.run(CpuRegistry())
    values = step.qkv.astype(np.float32).reshape(len(POSITIONS), -1, 64)[:, -1]
    for token, block, slot in step.slots():
        scale = np.abs(values[token]).max() / np.float32(127)
        assert step.pages.value_scales[block, 0, slot] == scale
        assert (step.pages.values[block, 0, slot] == np.rint(values[token] / scale)).all()


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e38])
def test_int8_of_zeros_and_of_extremes_is_finite(size: float) -> None:
    step = Step(CONFIGS[1], norms=False)
    step.qkv[:] = np.sign(step.qkv.astype(np.float32)) * np.float32(size)
    step.run(CpuRegistry())
    for _, block, slot in step.slots():
        stored, scale = step.pages.values[block, 0, slot], step.pages.value_scales[block, 0, slot]
        assert np.isfinite(scale)
        assert np.allclose(np.abs(stored * np.float64(scale)), size, rtol=1e-2, atol=2e-36)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.order.name)
@pytest.mark.parametrize("words", [200, 1], ids=["words of 16 bytes", "words of 4 bytes"])
def test_copies_happen_one_after_another(schedule: Any, words: int) -> None:
    """A chain, a swap through a third block, a target written twice, a block onto itself."""
    pairs = np.array([[0, 1], [1, 2], [3, 4], [5, 3], [4, 5], [6, 7], [0, 7], [8, 8]], np.int32)
    pool = np.random.default_rng(0).integers(0, 1 << 30, (4, 10, words * 9), np.int32)
    expected = pool.copy()
    for source, target in pairs:
        expected[:, target] = expected[:, source]
    registry = CpuRegistry()
    registry.schedule = schedule
    copy_blocks(registry, pool, pairs, len(pairs), stream=None)
    assert (pool == expected).all()


@pytest.mark.parametrize("words", [200, 1], ids=["words of 16 bytes", "words of 4 bytes"])
def test_gather_and_scatter(words: int) -> None:
    random, registry = np.random.default_rng(1), CpuRegistry()
    pool = random.integers(0, 1 << 30, (4, 9, words * 9), np.int32)
    before, blocks = pool.copy(), np.array([7, 0, 3], np.int32)
    staging = poisoned((3, 4, words * 9), np.int32)
    gather_blocks(registry, pool, blocks, staging, 3, stream=None)
    assert (staging == before[:, blocks].swapaxes(0, 1)).all()
    assert (pool == before).all()
    elsewhere = np.array([1, 8, 0], np.int32)
    scatter_blocks(registry, pool, elsewhere, staging, 3, stream=None)
    before[:, elsewhere] = before[:, blocks]
    assert (pool == before).all()


def test_only_as_many_as_counted() -> None:
    registry, pool = CpuRegistry(), np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4)
    copy_blocks(registry, pool, np.array([[0, 1], [FAR, FAR]], np.int32), 1, stream=None)
    assert (pool[:, 1] == pool[:, 0]).all()
    copy_blocks(registry, pool, np.array([[FAR, FAR]], np.int32), 0, stream=None)
    assert len(registry.reports) == 1
