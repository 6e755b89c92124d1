"""RoPE fields in both spellings, and the frequencies against formulas written down elsewhere."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.devices.memory import MemoryFacts, plan_memory
from engine.errors import ConfigError
from loader.architectures import decoder_config
from loader.decoder import RopeConfig
from loader.errors import CheckpointError
from loader.rope import inverse_frequencies
from tests.loader.files import config
from tests.reference import reference_frequencies

PATH = Path("config.json")

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def old(scaling: Any, theta: Any = 10000.0, **changes: Any) -> RopeConfig:
    values = config(**{"rope_parameters": ..., "rope_scaling": scaling, "rope_theta": theta} | changes)
    return decoder_config(values, PATH).rope


def new(parameters: Any, **changes: Any) -> RopeConfig:
    return decoder_config(config(rope_parameters=parameters, **changes), PATH).rope


def refused(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        decoder_config(config(**changes), PATH)
    return caught.value.problems


def test_l17_spellings_of_one_thing() -> None:
    linear = RopeConfig(kind="linear", theta=10000.0, factor=2.0)
    assert old({"type": "linear", "factor": 2}) == linear
    assert old({"rope_type": "linear", "factor": 2.0}) == linear
    assert old({"type": "linear", "rope_type": "linear", "factor": 2.0}) == linear
    assert new({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}) == linear
    assert new({"rope_type": "linear", "factor": 2.0}, rope_theta=10000.0) == linear
    both = {"type": "linear", "factor": 2.0}
    assert old(both, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}) == linear


@pytest.mark.parametrize("scaling", [..., None, {}, {"type": "default"}, {"rope_type": "default"}])
def test_l17_no_scaling(scaling: Any) -> None:
    assert old(scaling, theta=5e5) == RopeConfig(kind="default", theta=5e5)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5},
    ],
)
def test_l17_contradictions(fields: dict[str, Any]) -> None:
    assert any("contradicts" in problem for problem in refused(**fields))


def dynamic_frequencies(length: int, *, theta: float, factor: float, trained: int, head_dim: int) -> np.ndarray:
    """`_compute_dynamic_ntk_parameters` of transformers 5.24, in float64."""
    stretch = factor * max(length, trained) / trained - (factor - 1)
    base = theta * stretch ** (head_dim / (head_dim - 2))
    return 1.0 / base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_l22_dynamic_angles_are_the_plain_ones_of_every_length_that_is_served(spelling: str) -> None:
    trained = 2048
    given: dict[str, Any] = {"theta": 1e4, "factor": 2.0, "head_dim": 64}
    rope = old({spelling: "dynamic", "factor": 2.0}, max_position_embeddings=trained)
    found = inverse_frequencies(rope, 64)
    assert rope.attention_factor == 1.0 and np.isfinite(found).all()
    for served in (1, 512, trained):
        assert np.allclose(found, dynamic_frequencies(served, trained=trained, **given), rtol=1e-12, atol=0)
    longer = dynamic_frequencies(trained + 1, trained=trained, **given)
    assert np.abs(found - longer).max() > 1e-5
    facts = MemoryFacts(available=1 << 40, weights=0, workspace=0, block=1)
    with pytest.raises(ConfigError, match="max_model_len: 2049 is above the model's limit of 2048"):
        plan_memory(EngineConfig(model="m", max_model_len=trained + 1), facts, trained)
    assert plan_memory(EngineConfig(model="m"), facts, trained).max_model_len == trained


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", 3])
def test_kinds_that_are_not_there_are_refused_by_name(kind: Any) -> None:
    problems = refused(rope_parameters={"rope_type": kind, "factor": 2.0, "rope_theta": 1e4})
    assert any("rope_type" in p and f"{kind}" in p and "not supported" in p for p in problems)


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "linear", "factor": True}, "factor"),
        ({"rope_type": "dynamic"}, "factor"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha"),
        ({"factor": 2.0}, "rope_type"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "original_max"),
        ({"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ("linear", "rope_parameters"),
    ],
)
def test_broken_parameters_are_named(parameters: Any, name: str) -> None:
    assert any(name in problem for problem in refused(rope_parameters=parameters))


def test_l19_llama3_table() -> None:
    rope = new({"rope_type": "llama3", "rope_theta": 500000.0} | LLAMA3)
    found = inverse_frequencies(rope, 64)
    plain = 500000.0 ** -(np.arange(32) / 32)
    assert found.dtype == np.float64 and found.shape == (32,)
    assert np.array_equal(found[:15], plain[:15])
    assert np.all(found[15:18] < plain[15:18]) and np.all(found[15:18] > plain[15:18] / 32)
    assert np.allclose(found[18:], plain[18:] / 32, rtol=1e-12)
    assert np.allclose(found, reference_frequencies(rope, 64), rtol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("head_dim", [2, 32, 64, 80, 128])
@given(
    theta=st.sampled_from([1e4, 1e5, 5e5, 1e6]),
    factor=st.floats(1.5, 64.0),
    low=st.floats(0.5, 2.0),
    high=st.floats(3.0, 8.0),
    original=st.sampled_from([32, 2048, 8192, 32768]),
    fast=st.floats(16.0, 64.0),
    slow=st.floats(0.5, 4.0),
)
@settings(max_examples=20)
def test_tables_match_the_reference(
    kind: Any, truncate: bool, head_dim: int, theta: float, factor: float, low: float, high: float, original: int,
    fast: float, slow: float,
) -> None:  # fmt: skip
    rope = RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )
    found = inverse_frequencies(rope, head_dim)
    assert np.allclose(found, reference_frequencies(rope, head_dim), rtol=1e-9, atol=0)
    assert found[0] <= 1.0 and np.all(found > 0) and np.all(np.diff(found) <= 0)


def test_yarn_ramp_without_width() -> None:
    """beta_fast equal to beta_slow: a step from kept to stretched, no division by zero."""
    rope = RopeConfig(
        kind="yarn",
        theta=1e4,
        factor=4.0,
        original_max_position_embeddings=2048,
        beta_fast=8.0,
        beta_slow=8.0,
        truncate=False,
    )
    ratio = inverse_frequencies(rope, 64) * 1e4 ** (np.arange(32) / 32)
    step = 32 * math.log(2048 / (8 * 2 * math.pi)) / math.log(1e4)
    assert np.allclose(ratio, np.where(np.arange(32) < step, 1.0, 0.25))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"finetuned": True}, 0.1 * math.log(4) + 1),
    ],
)
def test_yarn_attention_factor(extra: dict[str, Any], expected: float) -> None:
    rope = new({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0} | extra)
    assert rope.attention_factor == pytest.approx(expected, rel=1e-12)
    assert rope.original_max_position_embeddings == 512  # max_position_embeddings
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
