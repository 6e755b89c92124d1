"""Exchanges between lanes, tensor cores, atomics, control flow and address spaces, compiled from CUDA C."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cupy", reason="the executor compiles through CuPy's wrapper of NVRTC: install the extra test-cuda")

from tests.cuda.ptx_kernels import run_lanes
from tests.gpu_without_gpu import executor
from tests.gpu_without_gpu.executor import SCHEDULES, Schedule

pytestmark = pytest.mark.cuda

LANES = np.arange(32)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=["in order", "reversed", "random"])


@every_schedule
@pytest.mark.parametrize(
    ("mode", "b", "clamp", "source"),
    [
        ("idx", 5, 0x1F, lambda lane: 5),
        ("idx", 3, 0x181F, lambda lane: lane & 24 | 3),  # segments of 8
        ("up", 3, 0x00, lambda lane: lane - 3 if lane >= 3 else None),
        ("up", 2, 0x1800, lambda lane: lane - 2 if lane % 8 >= 2 else None),
        ("down", 4, 0x1F, lambda lane: lane + 4 if lane < 28 else None),
        ("bfly", 16, 0x1F, lambda lane: lane ^ 16),
        ("bfly", 9, 0x1F, lambda lane: lane ^ 9),
    ],
)
def test_shuffles(mode: str, b: int, clamp: int, source: Callable[[int], int | None], schedule: Schedule) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 32, 32, np.uint32)
    code = f"shfl.sync.{mode}.b32 %d0|%q0, %a0, {b}, {clamp}, 0xffffffff; selp.u32 %d1, 1, 0, %q0;"
    moved, in_range = run_lanes(code, [values], [np.uint32, np.uint32], schedule=schedule)
    sources = [source(lane) for lane in range(32)]
    assert in_range.tolist() == [s is not None for s in sources]
    assert moved.tolist() == [values[lane if s is None else s] for lane, s in enumerate(sources)]


@every_schedule
def test_votes_matches_and_reductions(schedule: Schedule) -> None:
    values = np.random.default_rng(1).integers(0, 5, 32, np.uint32)
    code = """
        setp.gt.u32 %q0, %a0, 2;
        vote.sync.ballot.b32 %d0, %q0, -1; vote.sync.any.pred %q1, %q0, -1; vote.sync.all.pred %q2, %q0, -1;
        selp.u32 %d1, 1, 0, %q1; selp.u32 %d2, 1, 0, %q2;
        match.any.sync.b32 %d3, %a0, -1; match.all.sync.b32 %d4|%q3, 7, -1;
        redux.sync.add.u32 %d5, %a0, -1; redux.sync.max.s32 %d6, %a0, -1; redux.sync.xor.b32 %d7, %a0, -1;
    """
    d = run_lanes(code, [values], [np.uint32] * 8, schedule=schedule)
    bits = 1 << LANES.astype(np.uint64)
    assert (d[0] == int(bits[values > 2].sum())).all()
    assert (d[1] == (values > 2).any()).all() and (d[2] == (values > 2).all()).all()
    assert d[3].tolist() == [int(bits[values == v].sum()) for v in values]
    assert (d[4] == 0xFFFFFFFF).all()
    assert (d[5] == values.sum()).all() and (d[6] == values.max()).all()
    assert (d[7] == np.bitwise_xor.reduce(values)).all()


def test_elect_and_lane_masks() -> None:
    code = """
        elect.sync %d0|%q0, 0xffffffff; selp.u32 %d1, 1, 0, %q0;
        mov.u32 %d2, %lanemask_lt; mov.u32 %d3, %lanemask_ge; activemask.b32 %d4;
    """
    d = run_lanes(code, [np.zeros(32, np.uint32)], [np.uint32] * 5, arch="compute_90")
    assert (d[0] == 0).all() and d[1].tolist() == [1] + [0] * 31
    assert d[2].tolist() == [(1 << lane) - 1 for lane in range(32)]
    assert np.array_equal(d[3], ~d[2]) and d[4].tolist() == [1 << lane for lane in range(32)]


MATRIX = r"""
using u32 = unsigned int;
extern "C" __global__ void product(const uint4* a, const uint2* b, const float4* c, float4* d) {
  int lane = threadIdx.x;
  uint4 x = a[lane]; uint2 y = b[lane]; float4 z = c[lane], r;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 "
    "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
    : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
    : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y), "f"(z.x), "f"(z.y), "f"(z.z), "f"(z.w));
  d[lane] = r;
}
extern "C" __global__ void product_s8(const uint4* a, const uint2* b, int4* d) {
  int lane = threadIdx.x;
  uint4 x = a[lane]; uint2 y = b[lane]; int4 r;
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
    : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
    : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y), "r"(7));
  d[lane] = r;
}
extern "C" __global__ void fragments(const uint4* rows, uint4* plain, uint4* transposed) {
  __shared__ uint4 tile[32];
  int lane = threadIdx.x;
  tile[lane] = rows[lane];
  __syncwarp();
  u32 at = (u32)__cvta_generic_to_shared(&tile[lane]);
  uint4 f, t;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
    : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w) : "r"(at) : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
    : "=r"(t.x), "=r"(t.y), "=r"(t.z), "=r"(t.w) : "r"(at) : "memory");
  plain[lane] = f; transposed[lane] = t;
}
"""


def a_fragments(a: NDArray[Any]) -> NDArray[Any]:
    """[16, 2 w] elements to [32 lanes, 4, w / 4]: rows group and group + 8, columns of the lane, then those behind."""
    width = a.shape[1] // 8  # elements of a register
    out = np.empty((32, 4, width), a.dtype)
    for lane in range(32):
        group, first = lane // 4, width * (lane % 4)
        for register in range(4):
            row, column = group + 8 * (register % 2), first + 4 * width * (register // 2)
            out[lane, register] = a[row, column : column + width]
    return out


def b_fragments(b: NDArray[Any]) -> NDArray[Any]:
    width = b.shape[0] // 8
    out = np.empty((32, 2, width), b.dtype)
    for lane in range(32):
        for register in range(2):
            first = width * (lane % 4) + 4 * width * register
            out[lane, register] = b[first : first + width, lane // 4]
    return out


def c_fragments(c: NDArray[Any]) -> NDArray[Any]:
    return np.array([[c[lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2] for r in range(4)] for lane in range(32)])


@every_schedule
@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_mma_of_16_bit_floats(name: str, dtype: Any, schedule: Schedule) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((16, 16)).astype(dtype), rng.standard_normal((16, 8)).astype(dtype)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    out = executor.poisoned((32, 4), np.float32)
    kernel = executor.compile(MATRIX.replace("TYPE", name)).kernel("product")
    kernel.launch((1,), (32,), (a_fragments(a), b_fragments(b), c_fragments(c), out), schedule=schedule)
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(out, c_fragments(exact), rtol=1e-6, atol=1e-6)


def test_mma_of_int8() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(-128, 128, (16, 32), np.int8), rng.integers(-128, 128, (32, 8), np.int8)
    out = executor.poisoned((32, 4), np.int32)
    kernel = executor.compile(MATRIX.replace("TYPE", "f16")).kernel("product_s8")
    kernel.launch((1,), (32,), (a_fragments(a), b_fragments(b), out))
    assert np.array_equal(out, c_fragments(a.astype(np.int64) @ b.astype(np.int64) + 7))


@every_schedule
def test_ldmatrix(schedule: Schedule) -> None:
    tiles = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    plain, transposed = executor.poisoned((32, 4, 2), np.uint16), executor.poisoned((32, 4, 2), np.uint16)
    kernel = executor.compile(MATRIX.replace("TYPE", "f16")).kernel("fragments")
    kernel.launch((1,), (32,), (tiles, plain, transposed), schedule=schedule)
    for lane in range(32):
        group, pair = lane // 4, 2 * (lane % 4)
        assert np.array_equal(plain[lane], tiles[:, group, pair : pair + 2])
        assert np.array_equal(transposed[lane], tiles[:, pair : pair + 2, group])


ATOMICS = r"""
#include <cuda_bf16.h>
extern "C" __global__ void atomics(unsigned* u, int* s, float* f, unsigned long long* w, __nv_bfloat162* h,
                                   unsigned* old) {
  __shared__ unsigned local;
  if (threadIdx.x == 0) local = 0;
  __syncthreads();
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  old[i] = atomicAdd(u, 1u);
  atomicMax(s, (int)i - 50); atomicMin(s + 1, 20 - (int)i); atomicXor(u + 1, i); atomicOr(u + 2, 1u << (i % 32));
  atomicInc(u + 3, 9u); atomicAnd(u + 4, ~i); atomicExch(u + 5, 77u);
  atomicAdd(f, 0.5f); atomicAdd(w, 1ull << 33);
#if __CUDA_ARCH__ >= 900  // before, the header's loop starts with a plain load, which the race checker refuses
  atomicAdd(h, __floats2bfloat162_rn(1.f, 2.f));
#endif
  unsigned seen = *(volatile unsigned*)(u + 6), assumed;
  do { assumed = seen; seen = atomicCAS(u + 6, assumed, assumed + i); } while (seen != assumed);
  atomicAdd(&local, i);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(u + 7, local);
}
"""


@every_schedule
@pytest.mark.parametrize("arch", ["compute_80", "compute_90"])
def test_atomics(arch: str, schedule: Schedule) -> None:
    n = 128
    u = np.array([0, 0, 0, 0, 0xFFFFFFFF, 0, 0, 0], np.uint32)
    s, f, w = np.array([-1000, 1000], np.int32), np.zeros(1, np.float32), np.zeros(1, np.uint64)
    h, old = np.zeros(2, ml_dtypes.bfloat16), executor.poisoned(n, np.uint32)
    kernel = executor.compile(ATOMICS, arch=arch).kernel("atomics")
    kernel.launch((2,), (64,), (u, s, f, w, h, old), schedule=schedule)
    total = n * (n - 1) // 2
    assert u.tolist() == [n, 0, 0xFFFFFFFF, n % 10, 0xFFFFFF80, 77, total, total]
    assert sorted(old) == list(range(n)) and s.tolist() == [77, -107]
    assert (
        f[0] == n / 2
        and w[0] == n << 33
        and h.astype(float).tolist() == ([128, 256] if arch == "compute_90" else [0, 0])
    )


CONTROL = r"""
struct Five { int v[5]; float f; };
__constant__ float table[4] = {1.f, 2.f, 3.f, 4.f};
__device__ int counter = 7;
__device__ __noinline__ float sum(const float* p, int n, float x) {
  float s = 0;
  for (int i = 0; i < n; i++) s += x * p[i];
  return s;
}
__device__ __noinline__ Five raised(Five s) { s.v[2]++; return s; }
extern "C" __global__ void control(float* out, const float* in, int n, Five five, double d, unsigned char c) {
  float kept[12];
  for (int i = 0; i < 12; i++) kept[i] = in[i % n];
  int k = threadIdx.x;
  switch (n) {
    case 0: k += 3; break; case 1: k *= 5; break; case 2: k ^= 7; break; case 3: k = k / 3; break;
    case 4: k -= 9; break; case 5: k = k * k; break; case 6: k = k % 11; break; case 7: k = ~k; break;
  }
  out[threadIdx.x * 4] = (float)k;
  out[threadIdx.x * 4 + 1] = sum(kept, n, 2.f) + table[n & 3];
  out[threadIdx.x * 4 + 2] = (float)raised(five).v[n % 5] + five.f + (float)d + c;
  out[threadIdx.x * 4 + 3] = kept[(n * 5) % 12] + (float)counter;
}
"""


@pytest.mark.parametrize("n", range(1, 9))
def test_switches_calls_structs_and_module_variables(n: int) -> None:
    values = np.arange(10, 22, dtype=np.float32)
    out = executor.poisoned((32, 4), np.float32)
    five = np.array([(list(range(5)), 0.25)], np.dtype([("v", np.int32, 5), ("f", np.float32)]))[0]
    args = (out, values, np.int32(n), five, np.float64(0.5), np.uint8(200))
    executor.compile(CONTROL).kernel("control").launch((1,), (32,), args)
    k = LANES
    cases = {1: k * 5, 2: k ^ 7, 3: k // 3, 4: k - 9, 5: k * k, 6: k % 11, 7: ~k, 8: k}
    kept = [values[i % n] for i in range(12)]
    assert np.array_equal(out[:, 0], cases[n])
    assert (out[:, 1] == 2 * sum(kept[:n]) + [1, 2, 3, 4][n & 3]).all()
    assert (out[:, 2] == [0, 1, 3, 3, 4][n % 5] + 0.25 + 0.5 + 200).all()
    assert (out[:, 3] == kept[n * 5 % 12] + 7).all()


MATHS = r"""
extern "C" __global__ void maths(const float* x, float* y) {
  int i = threadIdx.x; float v = x[i]; float* o = y + 8 * i;
  o[0] = sinf(v * 1e4f); o[1] = expf(v); o[2] = logf(fabsf(v)); o[3] = powf(fabsf(v), 1.7f);
  o[4] = tanhf(v); o[5] = erff(v); o[6] = fmodf(v, 0.3f); o[7] = (float)log1p((double)fabsf(v));
}
"""


@pytest.mark.parametrize("options", [(), ("-ftz=true",), ("-use_fast_math",)], ids=["exact", "ftz", "fast"])
def test_the_compilers_own_maths(options: tuple[str, ...]) -> None:
    """NVRTC expands these into long sequences: rounding modes, Payne-Hanek tables in memory, f64 seeds."""
    from math import erf, fmod

    x = np.random.default_rng(4).uniform(-3, 3, 64).astype(np.float32)
    y = executor.poisoned((64, 8), np.float32)
    executor.compile(MATHS, options).kernel("maths").launch((1,), (64,), (x, y))
    v = x.astype(np.float64)
    large = (x * np.float32(1e4)).astype(np.float64)
    expected = np.stack(
        [
            np.sin(large), np.exp(v), np.log(abs(v)), abs(v) ** float(np.float32(1.7)), np.tanh(v),
            [erf(t) for t in v], [fmod(t, float(np.float32(0.3))) for t in v], np.log1p(abs(v)),
        ],
        1,
    )  # fmt: skip
    columns = slice(None) if "-use_fast_math" not in options else [1, 2, 3, 5, 7]
    np.testing.assert_allclose(y[:, columns], expected[:, columns], rtol=2e-5, atol=2e-6)


@every_schedule
def test_dynamic_shared_memory_and_barrier_reductions(schedule: Schedule) -> None:
    source = r"""
    extern "C" __global__ void k(const int* x, int* out) {
      extern __shared__ int row[];
      row[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
      int odd = __syncthreads_count(row[threadIdx.x] & 1);
      int all = __syncthreads_and(row[threadIdx.x] >= 0), any = __syncthreads_or(row[threadIdx.x] > 90);
      int other = row[blockDim.x - 1 - threadIdx.x];
      int* o = out + 4 * (blockIdx.x * blockDim.x + threadIdx.x);
      o[0] = odd; o[1] = all; o[2] = any; o[3] = other;
    }"""
    x = np.random.default_rng(5).integers(0, 100, (3, 96), np.int32)
    x[1, 5] = -3
    out = executor.poisoned((3, 96, 4), np.int32)
    executor.compile(source).kernel("k").launch((3,), (96,), (x, out), smem=96 * 4, schedule=schedule)
    for block in range(3):
        assert (out[block, :, 0] == (x[block] & 1).sum()).all()
        assert ((out[block, :, 1] != 0) == (x[block] >= 0).all()).all()
        assert ((out[block, :, 2] != 0) == (x[block] > 90).any()).all()
        assert np.array_equal(out[block, :, 3], x[block, ::-1])


def test_templates_by_name_expression() -> None:
    source = "template <class T, int N> __global__ void scale(T* x) { x[threadIdx.x] *= N; }"
    module = executor.compile(source, name_expressions=("scale<float, 3>", "scale<int, -2>"))
    f, i = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.int32)
    module.kernel("scale<float, 3>").launch((1,), (8,), (f,))
    module.kernel("scale<int, -2>").launch((1,), (8,), (i,))
    assert f.tolist() == [3 * v for v in range(8)] and i.tolist() == [-2 * v for v in range(8)]
