"""int8 keys and values on the cpu device: what is stored, that chunks change nothing, that copies are whole."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.devices.cpu.executor import CpuExecutor
from engine.plan import BlockCopy
from loader.weights import WeightSource
from tests.devices.driver import GREEDY, TINY, Driver, LoudWeights, Row, open_executor

PROMPT = np.random.default_rng(5).integers(0, TINY.vocab_size, 37).tolist()
STATE = replace(GREEDY, num_prompt_logprobs=0)


class NoValues(LoudWeights):
    """Every value vector of layer 0 is zero."""

    def tensor(self, name: str) -> NDArray[Any]:
        values = super().tensor(name)
        return np.zeros_like(values) if ".0.self_attn.v_proj" in name else values


def prefill(executor: CpuExecutor) -> Row:
    driver = Driver(executor)
    row = driver.add(2, PROMPT, STATE)
    driver.step({2: len(PROMPT)}, prompt_logprobs=True)
    return row


def layer_pages(executor: CpuExecutor, row: Row) -> list[NDArray[Any]]:
    """Keys and values [tokens, kv_heads, head_dim] of layer 0; of int8, their scales [tokens, kv_heads] too."""
    kv = executor.shape.kv
    kinds = [np.int8 if kv.is_int8 else np.float32] * 2 + [np.float32] * 2
    parts = []
    heads = executor.model.pool.reshape(kv.num_blocks, kv.slots, kv.kv_heads, -1)[list(row.blocks[0][:3]), 0]
    for part, kind in zip(np.split(heads, np.cumsum(kv.parts)[:3], axis=2), kinds, strict=True):
        if part.size:
            parts.append(np.ascontiguousarray(part).view(kind))
    keys = parts[0].reshape(3, kv.kv_heads, 32, 16).transpose(0, 3, 1, 2).reshape(48, kv.kv_heads, 32)
    values = parts[1].reshape(3, kv.kv_heads, 16, 32).transpose(0, 2, 1, 3).reshape(48, kv.kv_heads, 32)
    scales = [part.transpose(0, 2, 1).reshape(48, kv.kv_heads)[: len(PROMPT)] for part in parts[2:]]
    return [keys[: len(PROMPT), :, :24], values[: len(PROMPT), :, :24], *scales]


@pytest.mark.parametrize("weights", [LoudWeights(TINY), NoValues(TINY)], ids=["loud", "no-values"])
def test_pages_hold_the_rounded_heads_and_their_scales(weights: WeightSource) -> None:
    """Against float32 pages of the same tokens: layer 0's inputs do not depend on how pages are stored."""
    with open_executor(TINY, weights) as executor:
        exact = layer_pages(executor, prefill(executor))
    with open_executor(TINY, weights, kv_int8=True) as executor:
        row = prefill(executor)
        *stored, key_scales, value_scales = layer_pages(executor, row)
    for values, ints, scales in zip(exact, stored, (key_scales, value_scales), strict=True):
        expected = np.abs(values).max(axis=2) / np.float32(127)
        assert np.array_equal(scales, expected)
        divisors = np.where(expected > 0, expected, np.float32(1))[..., None]
        assert np.array_equal(ints, np.rint(values / divisors).astype(np.int8))
    assert all(np.isfinite(logits).all() for logits in row.logits.values())


class EqualValues(LoudWeights):
    """Every value of layer 0 is `value`."""

    def __init__(self, value: float) -> None:
        super().__init__(TINY)
        self.value = value

    def tensor(self, name: str) -> NDArray[Any]:
        values = super().tensor(name)
        if ".0.self_attn.v_proj" not in name:
            return values
        return np.full_like(values, self.value if name.endswith("bias") else 0.0)


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-40, 1e-30])
def test_rows_of_one_value_come_back_as_that_value(value: float) -> None:
    """A scale never divides by nothing: what is too small for a normal scale is 0."""
    with open_executor(TINY, EqualValues(value), kv_int8=True) as executor:
        row = prefill(executor)
        _, stored, _, scales = layer_pages(executor, row)
    found = stored.astype(np.float64) * scales[..., None]
    assert np.isfinite(scales).all() and (scales == 0).all() == (abs(value) / 127 < 2.0**-126)
    assert np.allclose(found, value, rtol=1e-6, atol=2e-36)
    assert all(np.isfinite(logits).all() for logits in row.logits.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_change_nothing(dtype: str) -> None:
    with open_executor(TINY, LoudWeights(TINY), kv_int8=True, dtype=dtype) as executor:
        rows = []
        for chunk in (64, 5):
            driver = Driver(executor, seed=chunk)
            driver.add(1, PROMPT, STATE)
            rows.append(driver.run(1, chunk, outputs=6))
    assert rows[0].sampled == rows[1].sampled
    assert all(np.array_equal(rows[0].logits[i], rows[1].logits[i]) for i in rows[0].logits)


def test_logits_stay_near_those_of_whole_pages() -> None:
    with open_executor(TINY, LoudWeights(TINY)) as executor:
        exact = prefill(executor).logits
    with open_executor(TINY, LoudWeights(TINY), kv_int8=True) as executor:
        rounded = prefill(executor).logits
    differences = [np.abs(rounded[i] - exact[i]).max() for i in exact]
    assert 0 < max(differences) < 0.1 * np.std([*exact.values()])


def test_a_copied_block_takes_its_scales_along() -> None:
    with open_executor(TINY, LoudWeights(TINY), kv_int8=True) as executor:
        driver = Driver(executor)
        row = driver.add(0, PROMPT, STATE)
        driver.step({0: 36}, prompt_logprobs=True)
        target = driver.free.pop()
        source, row.blocks[0] = row.blocks[0][2], (*row.blocks[0][:2], target, *row.blocks[0][3:])
        row.known = False
        driver.step({0: 1}, copies=(BlockCopy(0, source, target),))
        copied = row.logits[36]
        assert np.array_equal(copied, prefill(executor).logits[36])
