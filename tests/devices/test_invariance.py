"""Logits and ids, bit for bit, whatever the chunks, neighbours, blocks, stale memory, prefix hits and threads."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.devices.cpu.executor import CpuExecutor
from engine.devices.cpu.kernels.constants import GATE_UP_INT8
from engine.devices.cpu.numkong import has_int8_dot
from engine.plan import BlockCopy, SampleBatch
from loader.decoder import DecoderConfig
from tests.devices.driver import GREEDY, TINY, Driver, LoudWeights, open_executor
from tests.models.numpy_ops import numpy_logits

SEEDED = replace(GREEDY, temperature=0.9, top_k=40, top_p=0.95, seed=1234, num_logprobs=3, num_prompt_logprobs=0)
WINDOWED = replace(TINY, layer_windows=(4, None))
UNBIASED = replace(TINY, attention_bias=False, attention_output_bias=False, mlp_bias=False)
"""Without biases gates and ups of int8 are multiplied where they are computed."""
PROMPT = np.random.default_rng(5).integers(0, TINY.vocab_size, 45)
OUTPUTS = 8

Outcome = tuple[NDArray[np.float32], list[int]]


def outcome(driver: Driver, row: int = 0, chunk: int = 256, **add: Any) -> Outcome:
    """Logits at every computed position and the sampled ids of PROMPT alone on the executor's row."""
    driver.add(row, PROMPT, SEEDED, **add)
    sequence = driver.run(row, chunk, OUTPUTS)
    return np.stack([sequence.logits[i] for i in sorted(sequence.logits)]), sequence.sampled


def assert_same(a: Outcome, b: Outcome) -> None:
    np.testing.assert_array_equal(a[0].view(np.int32), b[0].view(np.int32))
    assert a[1] == b[1]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8", "int8 without biases"])
def executor(request: pytest.FixtureRequest) -> Iterator[CpuExecutor]:
    weights_int8 = request.param.startswith("int8")
    decoder = UNBIASED if request.param == "int8 without biases" else TINY
    if weights_int8 and not has_int8_dot():
        pytest.skip("the processor has no AVX512-VNNI, int8 weights are refused there")
    dtype = "bfloat16" if weights_int8 else request.param
    with open_executor(decoder, LoudWeights(decoder), dtype=dtype, weights_int8=weights_int8) as executor:
        yield executor


@pytest.fixture(scope="module")
def alone(executor: CpuExecutor) -> Outcome:
    executor.model.pool[:] = 0
    result = outcome(Driver(executor))
    assert np.isfinite(result[0]).all()
    assert len(set(result[1])) > 2
    return result


@pytest.mark.parametrize("chunk", [1, 8, 16, 17, 44])
def test_chunks(executor: CpuExecutor, alone: Outcome, chunk: int) -> None:
    assert_same(outcome(Driver(executor), chunk=chunk), alone)


@pytest.mark.parametrize("seed", [1, 2])
def test_stale_memory_and_block_ids(executor: CpuExecutor, alone: Outcome, seed: int) -> None:
    executor.model.pool[:] = 0xFF  # NaN in either dtype
    assert_same(outcome(Driver(executor, seed), row=seed), alone)


@pytest.mark.parametrize("length", range(1, 34))
def test_no_length_reads_an_unused_slot(executor: CpuExecutor, length: int) -> None:
    logits = []
    for filler in (0x00, 0xFF):
        executor.model.pool[:] = filler
        driver = Driver(executor)
        driver.add(0, PROMPT[:length], SEEDED)
        logits.append(driver.run(0, chunk=5, outputs=2).logits)
    for position in range(length + 1):
        np.testing.assert_array_equal(logits[0][position], logits[1][position])


def test_neighbours_that_come_and_go(executor: CpuExecutor, alone: Outcome) -> None:
    executor.model.pool[:] = 0xFF
    rng = np.random.default_rng(3)
    driver = Driver(executor)

    def neighbours() -> dict[int, int]:
        grants = {}
        for row in (1, 4, 6):
            if row in driver.rows and rng.random() < 0.3:
                driver.drop(row)
            if row not in driver.rows:
                hot = replace(SEEDED, temperature=2.0, top_k=int(rng.integers(0, 9)), seed=int(rng.integers(99)))
                driver.add(row, rng.integers(0, TINY.vocab_size, int(rng.integers(1, 40))), hot)
            sequence = driver.rows[row]
            left = len(sequence.ids) - sequence.computed
            if len(sequence.sampled) < 20:
                grants[row] = int(rng.integers(1, left + 1))
        return grants

    driver.add(3, PROMPT, SEEDED)
    sequence = driver.run(3, chunk=9, outputs=OUTPUTS, neighbours=neighbours)
    assert_same((np.stack([sequence.logits[i] for i in sorted(sequence.logits)]), sequence.sampled), alone)


def test_prefix_hit(executor: CpuExecutor, alone: Outcome) -> None:
    driver = Driver(executor)
    outcome(driver, row=2, chunk=7)
    shared = driver.rows[2].blocks[0][:2]
    logits, sampled = outcome(driver, row=5, shared=shared)
    assert_same((logits, sampled), (alone[0][32:], alone[1]))


def test_fork_by_block_copy(executor: CpuExecutor, alone: Outcome) -> None:
    """A row that continues on a copy of another's open block, while the first overwrites the original."""
    driver = Driver(executor)
    outcome(driver, row=2)
    shared = driver.rows[2].blocks[0]
    fork = driver.add(5, PROMPT, SEEDED, shared=shared[:2])
    driver.step({5: 1}, copies=(BlockCopy(0, shared[2], fork.blocks[0][2]),))
    fork.computed = len(PROMPT) - 1
    sequence = driver.run(5, 1, OUTPUTS)
    assert sequence.sampled == alone[1]
    for position in range(len(PROMPT) - 1, len(PROMPT) + OUTPUTS - 1):
        np.testing.assert_array_equal(sequence.logits[position], alone[0][position])


def test_choices_sample_from_one_entry(executor: CpuExecutor) -> None:
    """Each row samples with its own parameters, and its next placeholder is its own token."""
    driver = Driver(executor)
    driver.add(0, PROMPT, SEEDED)
    plan, _ = driver.plan({0: len(PROMPT)}, False, ())
    choices = tuple(replace(SEEDED, row=row, choice=row, temperature=3.0, top_k=0, top_p=1.0) for row in range(6))
    executor.on_logits = None
    executor.forward(replace(plan, row_states=choices))
    together = executor.sample(SampleBatch(plan.step, np.zeros(6, np.int32), np.arange(6, dtype=np.int32)))
    assert len(set(together.token_ids.tolist())) > 1
    for row in range(6):
        one = np.array([row], np.int32)
        executor.forward(replace(plan, row_states=choices))
        alone = executor.sample(SampleBatch(plan.step, np.zeros(1, np.int32), one))
        assert alone.token_ids[0] == together.token_ids[row]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads(dtype: str, threads: int) -> None:
    results = []
    for count in (2, threads):
        with open_executor(TINY, LoudWeights(TINY), dtype=dtype, threads=count) as executor:
            results.append(outcome(Driver(executor)))
    assert_same(*results)


@pytest.mark.parametrize("block_size", [1, 8, 16, 20, 64])
def test_block_sizes(block_size: int) -> None:
    weights = LoudWeights(TINY)
    expected = numpy_logits(TINY, weights, PROMPT.tolist())
    with open_executor(TINY, weights, block_size=block_size, num_blocks=256) as executor:
        results = [outcome(Driver(executor), chunk=chunk) for chunk in (256, 11)]
    assert_same(*results)
    assert np.abs(results[0][0][: len(PROMPT)] - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("decoder", [WINDOWED, replace(WINDOWED, layer_windows=(4, 17))], ids=["some", "all"])
def test_window_in_prefill_and_decode(decoder: DecoderConfig) -> None:
    """Query i sees keys i-3 .. i of a window of 4; pages behind the window may hold anything."""
    weights = LoudWeights(decoder)
    expected = numpy_logits(decoder, weights, PROMPT.tolist())
    with open_executor(decoder, weights) as executor:
        results = [outcome(Driver(executor), chunk=chunk) for chunk in (256, 7, 1)]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    assert np.abs(results[0][0][: len(PROMPT)] - expected).max() < 1e-4 * expected.std()


def test_pages_behind_the_window_are_not_read() -> None:
    decoder = replace(TINY, layer_windows=(4, 4))
    with open_executor(decoder, LoudWeights(decoder)) as executor:
        driver = Driver(executor)
        expected = outcome(driver)
        driver.drop(0)
        row = driver.add(0, PROMPT, SEEDED)
        driver.step({0: 40}, prompt_logprobs=True)
        freed = row.blocks[0][0]  # tokens 0 .. 15; the next query, 40, sees keys from 37
        executor.model.pool.reshape(executor.shape.kv.num_blocks, -1)[freed] = 0xFF
        sequence = driver.run(0, chunk=3, outputs=OUTPUTS)
        assert sequence.sampled == expected[1]


@pytest.mark.skipif(not has_int8_dot(), reason="the processor has no AVX512-VNNI, int8 weights are refused there")
@pytest.mark.parametrize("inner", [88, 96, 200])
def test_gates_and_ups_fused_are_what_they_are_apart(inner: int) -> None:
    """Biases of zero keep the two ops apart."""
    decoder = replace(TINY, intermediate_size=inner)
    outcomes = []
    for biased in (True, False):
        with open_executor(
            replace(decoder, mlp_bias=biased), ZeroBiases(decoder), dtype="bfloat16", weights_int8=True
        ) as executor:
            outcomes.append(outcome(Driver(executor)))
            assert (GATE_UP_INT8 in executor.model.body[:, 0]) is not biased
    assert_same(*outcomes)


class ZeroBiases(LoudWeights):
    def tensor(self, name: str) -> NDArray[Any]:
        values = super().tensor(name)
        return np.zeros_like(values) if "mlp" in name and name.endswith("bias") else values
