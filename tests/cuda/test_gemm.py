"""Products against float64 NumPy: every version, element type, epilogue and weight type; tails; invariance; traffic."""

import ctypes
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.devices.cuda.ops import cublas, gemm
from engine.devices.cuda.ops.gemm import Epilogue
from engine.devices.cuda.registry import Variant
from tests.cuda.kernels import SCHEDULES, CpuRegistry, element_dtype

pytestmark = pytest.mark.cuda

HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALL, TILED, V0 = "gemm_v1_small", "gemm_v1_tiled", "gemm_v0"


class Case(NamedTuple):
    """A product's inputs and what must come out, in float64, with the error that float32 sums may have."""

    x: NDArray[Any]
    weight: SimpleNamespace
    out: NDArray[Any]
    expected: NDArray[np.float64]
    bound: NDArray[np.float64]


def make_case(
    m: int, n: int, k: int, dtype: str, epilogue: Epilogue, bias: bool = False, int8: bool = False, seed: int = 0
) -> Case:
    rng, element = np.random.default_rng(seed), element_dtype(dtype)
    x = rng.standard_normal((m, k)).astype(element)
    shifts = rng.standard_normal(n).astype(np.float32) if bias else None
    if int8:
        values: NDArray[Any] = rng.integers(-127, 128, (n, k)).astype(np.int8)
        scales = rng.uniform(0.2, 2.0, n).astype(np.float32) / np.float32(127)
    else:
        values, scales = rng.standard_normal((n, k)).astype(element), None
    exact = values.astype(np.float64) * (1.0 if scales is None else scales.astype(np.float64)[:, None])
    product = x.astype(np.float64) @ exact.T + (0.0 if shifts is None else shifts)
    bound = (np.abs(x.astype(np.float64)) @ np.abs(exact).T + np.abs(product)) * (k + 4) * 2.0**-24
    expected, out = product, np.full((m, n), np.nan, element)
    if epilogue in (Epilogue.STORE_F32, Epilogue.ADD_F32):
        out = np.full((m, n), np.nan, np.float32)
    if epilogue == Epilogue.ADD_F32:
        out = rng.standard_normal((m, n)).astype(np.float32)
        expected = out + product
    if epilogue == Epilogue.SWIGLU:
        pairs = product.reshape(m, n // 16, 2, 8)
        gate, up = pairs[:, :, 0].reshape(m, -1), pairs[:, :, 1].reshape(m, -1)
        halves = bound.reshape(m, n // 16, 2, 8)
        bounds = halves[:, :, 0].reshape(m, -1), halves[:, :, 1].reshape(m, -1)
        expected, out = gate / (1 + np.exp(-gate)) * up, np.full((m, n // 2), np.nan, element)
        bound = 1.1 * bounds[0] * np.abs(up) + bounds[1] * np.abs(gate) + np.abs(expected) * 2.0**-20
    rounding = HALF_ULP[dtype] if out.dtype == element else 2.0**-23
    return Case(x, SimpleNamespace(values=values, scales=scales, bias=shifts), out, expected,
                bound + np.abs(expected) * rounding + 1e-7)  # fmt: skip


def run(registry: CpuRegistry, case: Case, epilogue: Epilogue, kernel: str) -> NDArray[Any]:
    """The product by the version the table picks, which must be `kernel`."""
    out = case.out.copy()
    gemm.linear(registry, case.x, case.weight, out, len(case.x), epilogue, stream=None)
    assert registry.reports[-1][0] == kernel
    return out


def check(registry: CpuRegistry, case: Case, epilogue: Epilogue, kernel: str) -> None:
    out = run(registry, case, epilogue, kernel)
    error = np.abs(out.astype(np.float64) - case.expected)
    assert (error <= case.bound).all(), f"{np.argwhere(~(error <= case.bound))[:4]} by {np.nanmax(error)}"


# Each epilogue with both element types, both weight types, with and without bias.
CONFIGURATIONS = [
    ("bfloat16", Epilogue.STORE, True, False),
    ("bfloat16", Epilogue.STORE_F32, False, True),
    ("bfloat16", Epilogue.ADD_F32, False, False),
    ("bfloat16", Epilogue.SWIGLU, True, True),
    ("float16", Epilogue.STORE, False, True),
    ("float16", Epilogue.STORE_F32, True, False),
    ("float16", Epilogue.ADD_F32, True, True),
    ("float16", Epilogue.SWIGLU, False, False),
]


@pytest.mark.parametrize("dtype, epilogue, bias, int8", CONFIGURATIONS)
@pytest.mark.parametrize(
    "kernel, shapes",
    [
        (V0, [(1, 32, 1), (19, 48, 21)]),
        (SMALL, [(1, 16, 16), (5, 48, 80), (16, 32, 576), (3, 80, 1168)]),
        (TILED, [(17, 16, 16), (70, 80, 144), (130, 48, 576)]),
    ],
)
def test_products(
    kernel: str, shapes: list[tuple[int, int, int]], dtype: str, epilogue: Epilogue, bias: bool, int8: bool
) -> None:
    registry = CpuRegistry()
    for m, n, k in shapes:
        check(registry, make_case(m, n, k, dtype, epilogue, bias, int8), epilogue, kernel)


@pytest.mark.parametrize("kernel, m", [(SMALL, 9), (TILED, 67), (V0, 5)])
@pytest.mark.parametrize("n", [1, 7, 50, 65])
def test_any_number_of_outputs(kernel: str, m: int, n: int) -> None:
    """Odd N is stored one by one, and W ends in the middle of a tile."""
    k = 9 if kernel == V0 else 24
    for epilogue in (Epilogue.STORE, Epilogue.ADD_F32):
        check(CpuRegistry(), make_case(m, n, k, "bfloat16", epilogue), epilogue, kernel)


@pytest.mark.parametrize("tile", gemm._TILES, ids=lambda tile: f"{tile['TILE_M']}x{tile['TILE_N']}")
@pytest.mark.parametrize("dtype, epilogue, bias, int8", [CONFIGURATIONS[3], CONFIGURATIONS[6]])
def test_every_tile(
    monkeypatch: pytest.MonkeyPatch, tile: dict[str, int], dtype: str, epilogue: Epilogue, bias: bool, int8: bool
) -> None:
    monkeypatch.setattr(gemm, "_TILES", (tile,))
    for m, n, k in ((40, 144, 144), (150, 80, 80)):
        defines = gemm.plan(m, n, k, element_dtype(dtype), epilogue, bias=bias, int8=int8).defines
        assert tile.items() <= defines.items()
        check(CpuRegistry(), make_case(m, n, k, dtype, epilogue, bias, int8), epilogue, TILED)


def test_a_tile_fills_the_gpu_or_is_the_smallest() -> None:
    def tile(rows: int, n: int) -> tuple[int, int]:
        defines = gemm.plan(rows, n, 64, element_dtype("bfloat16"), Epilogue.STORE, bias=False, int8=False).defines
        return defines["TILE_M"], defines["TILE_N"]

    assert [tile(rows, 4096) for rows in (17, 64, 128, 512)] == [(64, 32), (64, 32), (64, 64), (128, 128)]
    assert [tile(rows, 128_256) for rows in (17, 64, 65)] == [(64, 64), (64, 64), (128, 128)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel, m, k", [(SMALL, 3, 1168), (TILED, 66, 1168), (V0, 17, 35)])
def test_any_schedule(kernel: str, m: int, k: int, schedule: Any) -> None:
    """Enough of K for every stage of a ring to be used twice; the race checker is on."""
    registry = CpuRegistry()
    registry.schedule = schedule
    check(registry, make_case(m, 32, k, "bfloat16", Epilogue.SWIGLU, True, True), Epilogue.SWIGLU, kernel)


@pytest.mark.parametrize("arch", ["compute_90", "compute_100", "compute_120"])
def test_other_architectures(arch: str) -> None:
    for kernel, m in ((SMALL, 4), (TILED, 20)):
        check(CpuRegistry(arch), make_case(m, 48, 80, "bfloat16", Epilogue.STORE), Epilogue.STORE, kernel)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("k", [80, 576, 1616])
def test_a_row_has_the_same_bits_in_every_batch(monkeypatch: pytest.MonkeyPatch, k: int, int8: bool) -> None:
    """Alone, among 16, and by every tile: places of the row and shapes of tiles change nothing."""
    case = make_case(70, 80, k, "bfloat16", Epilogue.STORE_F32, True, int8)
    registry = CpuRegistry()
    whole = run(registry, case, Epilogue.STORE_F32, TILED)
    for tile in gemm._TILES:
        with monkeypatch.context() as context:
            context.setattr(gemm, "_TILES", (tile,))
            np.testing.assert_array_equal(run(registry, case, Epilogue.STORE_F32, TILED), whole)
    for rows in (slice(0, 1), slice(69, 70), slice(30, 46), slice(3, 10)):
        part = case._replace(x=case.x[rows].copy(), out=case.out[rows].copy())
        np.testing.assert_array_equal(run(registry, part, Epilogue.STORE_F32, SMALL), whole[rows])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("m", [1, 16])
def test_few_rows_read_the_weight_once(m: int, int8: bool) -> None:
    case, registry = make_case(m, 80, 576, "bfloat16", Epilogue.ADD_F32, int8=int8), CpuRegistry()
    run(registry, case, Epilogue.ADD_F32, SMALL)
    traffic = registry.reports[-1][1].arrays[1]
    assert traffic.loaded == traffic.unique_loaded == case.weight.values.nbytes


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kernel, m", [(SMALL, 7), (TILED, 70)])
def test_shared_memory_has_no_bank_conflicts(kernel: str, m: int, int8: bool) -> None:
    epilogue, registry = (Epilogue.SWIGLU if int8 else Epilogue.STORE), CpuRegistry()
    registry.profile = True
    run(registry, make_case(m, 48, 336, "bfloat16", epilogue, True, int8), epilogue, kernel)
    profile = registry.reports[-1][1].profile
    assert profile is not None
    assert profile.shared_accesses > 0
    assert profile.bank_conflicts == 0


def test_no_rows_is_no_launch() -> None:
    registry, case = CpuRegistry(), make_case(1, 16, 16, "bfloat16", Epilogue.STORE)
    gemm.linear(registry, case.x[:0], case.weight, case.out[:0], 0, Epilogue.STORE, stream=None)
    assert not registry.reports


def test_every_launch_is_among_the_variants_and_fits_the_smallest_gpu() -> None:
    everything = set(gemm.all_variants())
    for rows in (1, 16, 17, 300, 8192):
        for n, k in ((576, 576), (80, 24), (1536, 577), (49152, 576), (14336, 4096)):
            for dtype, epilogue, bias, int8 in CONFIGURATIONS:
                element = element_dtype(dtype)
                launch = gemm.plan(rows, n, k, element, epilogue, bias=bias, int8=int8)
                variant = Variant.of(launch.source, launch.defines)
                assert variant in set(gemm.variants(element, [(k, epilogue, bias, int8)])) <= everything
                assert launch.shared_mem <= 99 << 10
                assert launch.grid[1] <= 65535


def _matrix(address: int, code: int, rows: int, columns: int, stride: int) -> NDArray[Any]:
    """A column-major matrix of cuBLAS as a NumPy view."""
    dtype = np.dtype(np.float32) if code == 0 else element_dtype({2: "float16", 14: "bfloat16"}[code])
    raw = (ctypes.c_uint8 * (stride * columns * dtype.itemsize)).from_address(address)
    values: NDArray[Any] = np.ctypeslib.as_array(raw).view(dtype)
    return values.reshape(columns, stride)[:, :rows].T


class _Cublas(ModuleType):
    """gemmEx as the cuBLAS documentation defines it."""

    def gemmEx(
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, a_type: int,
        lda: int, b: int, b_type: int, ldb: int, beta: int, c: int, c_type: int, ldc: int, compute: int, algorithm: int,
    ) -> None:  # fmt: skip
        assert (handle, compute, algorithm) == (7, 68, -1)
        left = _matrix(a, a_type, *((k, m) if transa else (m, k)), lda).astype(np.float64)
        right = _matrix(b, b_type, *((n, k) if transb else (k, n)), ldb).astype(np.float64)
        result = _matrix(c, c_type, m, n, ldc)
        scalars = (ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))[0] for pointer in (alpha, beta))
        one, zero = scalars
        product = one * (left.T if transa else left) @ (right.T if transb else right)
        result[...] = product + (zero * result if zero else 0.0)


class _OnGpu:
    """A NumPy array with the part of CuPy's surface that names its memory."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.dtype, self.shape = array.dtype, array.shape
        self.data = SimpleNamespace(ptr=array.ctypes.data)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.STORE_F32, Epilogue.ADD_F32])
def test_cublas_is_asked_for_the_same_product(monkeypatch: pytest.MonkeyPatch, dtype: str, epilogue: Epilogue) -> None:
    device = ModuleType("cupy.cuda.device")
    device.get_cublas_handle = lambda: 7  # type: ignore[attr-defined]
    double = _Cublas("cupy_backends.cuda.libs.cublas")
    libs = pytest.importorskip("cupy_backends.cuda.libs", reason="CuPy is not installed")
    monkeypatch.setitem(sys.modules, "cupy.cuda.device", device)
    monkeypatch.setitem(sys.modules, double.__name__, double)
    monkeypatch.setitem(vars(libs), "cublas", double)
    case = make_case(10, 7, 24, dtype, epilogue)
    out = case.out.copy()
    weight = SimpleNamespace(values=_OnGpu(case.weight.values), scales=None, bias=None)
    cublas.linear(_OnGpu(case.x), weight, _OnGpu(out), 10, epilogue, stream=nullcontext())
    assert (np.abs(out.astype(np.float64) - case.expected) <= case.bound).all()
    assert cublas.missing() is None


def test_cublas_takes_large_products_with_nothing_fused() -> None:
    large, small = (np.broadcast_to(np.float16(0), (size, 4096)) for size in (4096, 2048))

    def weight(values: NDArray[Any] = large, **fused: Any) -> SimpleNamespace:
        return SimpleNamespace(**{"values": values, "scales": None, "bias": None} | fused)

    assert cublas.takes(weight(), 256, Epilogue.ADD_F32)
    assert not cublas.takes(weight(), 255, Epilogue.ADD_F32)
    assert not cublas.takes(weight(small), 256, Epilogue.ADD_F32)
    assert cublas.takes(weight(small), 512, Epilogue.ADD_F32)
    assert not cublas.takes(weight(), 256, Epilogue.SWIGLU)
    assert not cublas.takes(weight(bias=np.zeros(1)), 256, Epilogue.STORE)
    assert not cublas.takes(weight(scales=np.zeros(1)), 256, Epilogue.STORE)
