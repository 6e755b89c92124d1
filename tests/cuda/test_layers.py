"""Embedding, row selection, RMSNorm and the MLP's gate against float64 NumPy, both versions of each."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.devices.cuda.ops import layers
from engine.devices.cuda.registry import Variant
from tests.cuda.kernels import SCHEDULES, CpuRegistry, element_dtype
from tests.gpu_without_gpu.executor import poisoned

pytestmark = pytest.mark.cuda

HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
DTYPES = ["bfloat16", "float16"]

# Widths of version 1, then of version 0: not a multiple of 8, or a row too long for registers.
WIDTHS = [(8, 1), (80, 1), (576, 1), (2304, 1), (5, 0), (77, 0), (579, 0)]


def rounded(expected: NDArray[np.float64], dtype: str, error: float = 2.0**-21) -> NDArray[np.float64]:
    """Bound of what rounding to the element type and float32 arithmetic may do."""
    smallest = 2.0**-133 if dtype == "bfloat16" else 2.0**-24
    return np.abs(expected) * (HALF_ULP[dtype] + error) + smallest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, version", WIDTHS)
def test_embedding(width: int, version: int, dtype: str) -> None:
    rng, registry = np.random.default_rng(0), CpuRegistry()
    weight = (rng.standard_normal((11, width)) * 100).astype(element_dtype(dtype))
    ids = np.array([10, 0, 3, 3], np.int32)
    out = poisoned((5, width), np.float32)
    layers.embedding(registry, ids, weight, out, 4, stream=None)
    np.testing.assert_array_equal(out[:4], weight.astype(np.float32)[ids])
    assert np.isnan(out[4]).all()
    assert registry.reports[0][0] == f"embedding_v{version}"


@pytest.mark.parametrize("width, version", WIDTHS)
def test_select_rows(width: int, version: int) -> None:
    x, registry = np.random.default_rng(1).standard_normal((9, width)).astype(np.float32), CpuRegistry()
    indices, out = np.array([8, 2, 2], np.int32), poisoned((4, width), np.float32)
    layers.select_rows(registry, indices, x, out, 3, stream=None)
    np.testing.assert_array_equal(out[:3], x[indices])
    assert np.isnan(out[3]).all()
    assert registry.reports[0][0] == f"select_rows_v{version}"


def norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, version", [*WIDTHS, (16384, 1), (16392, 0)])
def test_rms_norm(width: int, version: int, dtype: str) -> None:
    rng, registry = np.random.default_rng(2), CpuRegistry()
    x = rng.standard_normal((3, width)).astype(np.float32) * np.array([[1], [1e-4], [300]], np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    out = poisoned((3, width), element_dtype(dtype))
    layers.rms_norm(registry, x, weight, out, 3, 1e-5, stream=None)
    expected = norm(x, weight, 1e-5)
    assert (np.abs(out.astype(np.float64) - expected) <= rounded(expected, dtype)).all()
    name, report = registry.reports[0]
    assert name == f"rms_norm_v{version}"
    if version == 1:
        assert report.arrays[0].loaded == x.nbytes  # once


def test_rms_norm_of_zeros_is_zero() -> None:
    out = poisoned((1, 64), element_dtype("bfloat16"))
    layers.rms_norm(CpuRegistry(), np.zeros((1, 64), np.float32), np.ones(64, np.float32), out, 1, 1e-6, stream=None)
    assert not out.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width, version", WIDTHS)
def test_silu_and_mul(width: int, version: int, interleaved: bool, dtype: str) -> None:
    if interleaved and width % 8:
        with pytest.raises(ValueError, match="groups of 8"):
            gate = poisoned((1, 2 * width), element_dtype(dtype))
            out = poisoned((1, width), element_dtype(dtype))
            layers.silu_and_mul(CpuRegistry(), gate, out, 1, interleaved=True, stream=None)
        return
    rng, registry = np.random.default_rng(3), CpuRegistry()
    gate, up = ((rng.standard_normal((4, width)) * 4).astype(element_dtype(dtype)) for _ in range(2))
    gate[0, :3] = -90, 60, 0
    halves = [gate, up] if not interleaved else [part.reshape(4, -1, 8) for part in (gate, up)]
    gate_up = np.concatenate(halves, axis=-1).reshape(4, 2 * width)
    out = poisoned((4, width), element_dtype(dtype))
    layers.silu_and_mul(registry, gate_up, out, 4, interleaved=interleaved, stream=None)
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up.astype(np.float64)
    # exp(-gate) overflows beyond a gate of -88, where the result is below 1e-36
    assert (np.abs(out.astype(np.float64) - expected) <= rounded(expected, dtype, 2.0**-20) + 1e-36).all()
    assert registry.reports[0][0] == f"silu_and_mul_v{version}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("width", [72, 77, 2304])
def test_a_norm_under_any_schedule_and_in_any_batch(width: int, schedule: Any) -> None:
    rng, registry = np.random.default_rng(4), CpuRegistry()
    registry.schedule = schedule
    x, weight = rng.standard_normal((5, width)).astype(np.float32), rng.standard_normal(width).astype(np.float32)
    whole, alone = (poisoned((rows, width), element_dtype("float16")) for rows in (5, 1))
    layers.rms_norm(registry, x, weight, whole, 5, 1e-5, stream=None)
    layers.rms_norm(registry, x[3:4].copy(), weight, alone, 1, 1e-5, stream=None)
    np.testing.assert_array_equal(whole[3], alone[0])


@pytest.mark.parametrize("arch", ["compute_90", "compute_100", "compute_120"])
def test_other_architectures(arch: str) -> None:
    rng, registry = np.random.default_rng(5), CpuRegistry(arch)
    x, weight = rng.standard_normal((2, 576)).astype(np.float32), rng.standard_normal(576).astype(np.float32)
    out = poisoned((2, 576), element_dtype("bfloat16"))
    layers.rms_norm(registry, x, weight, out, 2, 1e-5, stream=None)
    expected = norm(x, weight, 1e-5)
    assert (np.abs(out.astype(np.float64) - expected) <= rounded(expected, "bfloat16")).all()


def test_every_launch_is_among_the_variants() -> None:
    everything = set(layers.all_variants())
    for dtype in map(element_dtype, DTYPES):
        for width in (8, 77, 576, 4096, 16384, 16392):
            assert set(layers.variants(dtype, [width])) <= everything
    names = set(layers.variants(element_dtype("float16"), [576]))
    assert Variant.of("layers/v1_rms_norm.cu", {"ELEM_BF16": 0, "VECTORS": 1}) in names
    assert {Variant.of("layers/v1.cu", {"ELEM_BF16": flag}) for flag in (0, 1)} <= names  # row selection has no element


def test_no_rows_is_no_launch() -> None:
    registry, x = CpuRegistry(), poisoned((1, 16), np.float32)
    layers.rms_norm(registry, x, x[0], poisoned((1, 16), np.float16), 0, 1e-5, stream=None)
    layers.select_rows(registry, np.zeros(1, np.int32), x, x.copy(), 0, stream=None)
    assert not registry.reports
