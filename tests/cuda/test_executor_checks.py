"""Every check of the executor: a kernel that violates it, found under every schedule, and a neighbour that does not."""

import re

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the executor compiles through CuPy's wrapper of NVRTC: install the extra test-cuda")

from tests.cuda.executor_cases import RACES, Case
from tests.gpu_without_gpu import executor
from tests.gpu_without_gpu.executor import SCHEDULES, LaunchError, Schedule

pytestmark = pytest.mark.cuda

CASES = [
    *RACES,
    Case(
        "past an array",
        r"out of bounds: write of 4 bytes at offset 1024 of an allocation of 1024 bytes \(argument 0\)",
        """int t = threadIdx.x + 64 * blockIdx.x;
        #ifdef GOOD
        x[t + 128] = 1;
        #else
        x[t + 129] = 1;
        #endif""",
    ),
    Case(
        "before an array",
        "out of bounds: read of 4 bytes",
        """int t = threadIdx.x + 64 * blockIdx.x;
        #ifdef GOOD
        x[t] = x[t];
        #else
        x[t] = x[t - 1024];
        #endif""",
    ),
    Case(
        "past a shared array, into another's neighbourhood",
        "out of bounds: write of 4 bytes at shared offset 256, in no shared variable",
        """__shared__ float s[64], r[64]; int t = threadIdx.x;
        r[t] = 0;
        #ifdef GOOD
        s[t] = r[t];
        #else
        (t < 64 ? s : r)[t + 1] = r[t];
        #endif
        __syncthreads();
        x[blockIdx.x * 64 + t] = s[t];""",
    ),
    Case(
        "past a local array",
        "out of bounds: (read|write) of 4 bytes at .*, in no local array|uninitialised read of local memory",
        """float kept[8]; int t = threadIdx.x;
        for (int i = 0; i < 8; i++) kept[i] = x[i + t];
        #ifdef GOOD
        int i = u[0] + t % 8;
        #else
        int i = u[0] + t % 9;
        #endif
        x[128 + blockIdx.x * 64 + t] = kept[i];""",
    ),
    Case(
        "a write to a constant input",
        r"write of a read-only array \(argument 1\)",
        """int t = threadIdx.x;
        float4 v = in[t];
        #ifdef BAD
        if (blockIdx.x == 1) const_cast<float4*>(in)[t].y = v.x + 1;
        #endif
        x[blockIdx.x * 64 + t] = v.x;""",
    ),
    Case(
        "shared memory that nobody has written",
        "uninitialised read of shared memory",
        """__shared__ float s[65]; int t = threadIdx.x;
        s[t] = 1;
        #ifdef GOOD
        if (t == 0) s[64] = 1;
        #endif
        __syncthreads();
        x[blockIdx.x * 64 + t] = s[t + 1];""",
    ),
    Case(
        "local memory that was not written",
        "uninitialised read of local memory",
        """float kept[8]; int t = threadIdx.x;
        #ifdef GOOD
        for (int i = 0; i < 8; i++) kept[i] = 0;
        #endif
        kept[(t + u[0]) % 8] = 1;
        x[blockIdx.x * 64 + t] = kept[(t + u[1] + 1) % 8];""",
    ),
    Case(
        "a vector at an odd address",
        "misaligned access: 8 bytes",
        """int t = threadIdx.x + 64 * blockIdx.x;
        #ifdef GOOD
        reinterpret_cast<float2*>(x)[t] = make_float2(1, 2);
        #else
        reinterpret_cast<float2*>(x + 1)[t] = make_float2(1, 2);
        #endif""",
    ),
    Case(
        "a barrier in a branch",
        "divergence: threads of the block wait at another barrier|divergence: a thread exits|after some have exited",
        """
        #ifdef GOOD
        if (blockIdx.x == 1) __syncthreads();
        #else
        if (threadIdx.x < 32) __syncthreads();
        #endif
        x[blockIdx.x * 64 + threadIdx.x] = 1;""",
    ),
    Case(
        "two barriers that meet",
        "divergence: threads of the block wait at another barrier",
        """
        #ifdef GOOD
        if (blockIdx.x < 1)
        #else
        if (threadIdx.x < 32)
        #endif
        { x[blockIdx.x] = 1; __syncthreads(); }
        else { x[128] = 2; __syncthreads(); }"""
        .replace("x[blockIdx.x] = 1", "if (threadIdx.x == 0) x[blockIdx.x] = 1")
        .replace("x[128] = 2", "if (threadIdx.x == 32) x[128] = 2"),
    ),
    Case(
        "a shuffle without all of its lanes",
        "divergence: ",
        """float v = x[threadIdx.x + 64 * blockIdx.x];
        #ifdef GOOD
        unsigned mask = __ballot_sync(~0u, threadIdx.x % 32 < 20);
        #else
        unsigned mask = ~0u;
        #endif
        if (threadIdx.x % 32 < 20) v += __shfl_sync(mask, v, 0);
        x[threadIdx.x + 64 * blockIdx.x] = v;""",
    ),
    Case(
        "a shuffle from a lane outside the mask",
        "divergence: shfl.sync reads lane 17, which is not in the mask",
        """float v = x[threadIdx.x + 64 * blockIdx.x];
        #ifdef GOOD
        if (threadIdx.x % 32 < 16) v += __shfl_sync(0xffffu, v, 3);
        #else
        if (threadIdx.x % 32 < 16) v += __shfl_sync(0xffffu, v, 17);
        #endif
        x[threadIdx.x + 64 * blockIdx.x] = v;""",
    ),
    Case(
        "warps that wait for each other's barriers",
        "deadlock",
        """int w = threadIdx.x / 32;
        #ifdef GOOD
        bar(1, 64); bar(2, 64);
        #else
        if (w == 0) { bar(1, 64); bar(2, 64); } else { bar(2, 64); bar(1, 64); }
        #endif
        x[blockIdx.x * 64 + threadIdx.x] = w;""",
    ),
    Case(
        "a poll that nobody answers",
        "livelock",
        """
        #ifdef GOOD
        if (threadIdx.x == 32) atomicExch(u, 1u);
        #endif
        if (threadIdx.x == 0) while (atomicAdd(u, 0u) == 0) { }""",
        grid=1,
    ),
    Case(
        "an assertion",
        "trap: assertion failed",
        """
        #ifdef GOOD
        assert(x[threadIdx.x] == 1);
        #else
        assert(x[threadIdx.x] == 2);
        #endif""",
    ),
]  # fmt: skip


def launch(case: Case, which: str, schedule: Schedule) -> None:
    inputs = np.ones((64, 4), np.float32)
    inputs.flags.writeable = False
    args = (np.ones(256, np.float32), inputs, np.zeros(8, np.uint32))
    kernel = executor.compile(case.source, (f"-D{which}",), name="case.cu").kernel("k")
    kernel.launch((case.grid,), (case.block,), args, schedule=schedule)


every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=["in order", "reversed", "random"])


@every_case
@every_schedule
def test_violation_is_found(case: Case, schedule: Schedule) -> None:
    with pytest.raises(LaunchError, match=case.error) as found:
        launch(case, "BAD", schedule)
    assert str(found.value).startswith("k: ")
    if "deadlock" not in case.error:
        assert "in block (" in str(found.value) and "thread (" in str(found.value)
    assert "case.cu:" in str(found.value) or "exits without waiting" in case.error


@every_case
@every_schedule
def test_neighbour_is_not(case: Case, schedule: Schedule) -> None:
    launch(case, "GOOD", schedule)


def test_the_message_names_line_and_caller() -> None:
    source = (
        '__device__ void put(float* p) {\n  *p = 1;\n}\nextern "C" __global__ void k(float* x) {\n  put(x + 9);\n}\n'
    )
    with pytest.raises(LaunchError) as found:
        executor.compile(source, name="lines.cu").kernel("k").launch((1,), (1,), (np.zeros(9, np.float32),))
    assert re.search(r"lines\.cu:2, inlined at \S*lines\.cu:5 \(st\.global", str(found.value))
    assert "block (0,0,0) thread (0,0,0)" in str(found.value)


def test_a_failed_launch_changes_nothing() -> None:
    source = 'extern "C" __global__ void k(float* x) { x[0] = 5; x[1] = 5; x[2] = 5; }'
    x = np.zeros(2, np.float32)
    with pytest.raises(LaunchError):
        executor.compile(source).kernel("k").launch((1,), (1,), (x,))
    assert not x.any()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("wgmma.fence.sync.aligned;", "unknown opcode: `wgmma.fence.sync.aligned`"),
        ("add.wrapping.s32 %0, %0, %0;", "unknown modifier .wrapping"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 %0, %0, %0, %0;", "expected one of m16n8k16"),
        ("mov.u32 %0, %%smid_of_nobody;", "unknown register %smid_of_nobody"),
    ],
)
def test_unknown_instructions_are_errors(code: str, error: str) -> None:
    """As PTX text: NVRTC does not look into inline asm, ptxas would."""
    source = (
        f'extern "C" __global__ void k(int* x) {{\n  int v = *x;\n  asm volatile("{code}" : "+r"(v));\n  *x = v;\n}}'
    )
    with pytest.raises(executor.PtxError) as found:
        executor.compile(source, name="unknown.cu")
    assert error in str(found.value) and "unknown.cu:3" in str(found.value)


def test_arguments_and_shapes_are_checked_before_anything_runs() -> None:
    source = r"""extern "C" __global__ void __launch_bounds__(64) k(float* x, int n, double d) {
      __shared__ int s[9]; s[threadIdx.x % 9] = 1; __syncthreads(); x[0] = s[n];
    }"""
    kernel = executor.compile(source).kernel("k")
    x, good = np.zeros(4, np.float32), (np.int32(1), np.float64(1))
    for args, error in (
        ((x, 1, np.float64(1)), TypeError),
        ((x, np.int64(1), np.float64(1)), TypeError),
        ((x, np.int32(1), np.float32(1)), TypeError),
        ((x, *good, np.int32(1)), TypeError),
        ((x[::2], *good), ValueError),
    ):
        with pytest.raises(error):
            kernel.launch((1,), (1,), args)  # type: ignore[arg-type]
    for grid, block, smem in (((0,), (1,), 0), ((1,), (65,), 0), ((1,), (1,), 163 * 1024 - 35)):
        with pytest.raises(ValueError):
            kernel.launch(grid, block, (x, *good), smem=smem)
    kernel.launch((1,), (64, 1, 1), (x, *good), smem=163 * 1024 - 36, check_races=False)
    assert x[0] == 1
    with pytest.raises(executor.CompileError, match="undeclared_thing"):
        executor.compile('extern "C" __global__ void k() { undeclared_thing = 1; }')


def test_bytes_are_counted_per_array() -> None:
    source = r"""extern "C" __global__ void k(const float* x, const unsigned char* y, float* out) {
      int t = threadIdx.x;
      out[t] = x[t / 2] + x[t / 2 + 1] + y[3 * t];
    }"""
    arrays = (np.ones(40, np.float32), np.ones(200, np.uint8), executor.poisoned(64, np.float32))
    report = executor.compile(source).kernel("k").launch((1,), (64,), arrays)
    x, y, out = (report.arrays[i] for i in range(3))
    assert (x.loaded, x.unique_loaded, x.stored) == (64 * 8, 33 * 4, 0)
    assert (y.loaded, y.unique_loaded) == (64, 64)
    assert (out.stored, out.unique_stored, out.loaded) == (256, 256, 0)
    assert report.profile is None


@pytest.mark.parametrize(("stride", "conflicts"), [(1, 0), (2, 2), (32, 62), (33, 0)])
def test_bank_conflicts_and_sectors_are_counted(stride: int, conflicts: int) -> None:
    source = r"""extern "C" __global__ void k(const float* x, float* y, int stride) {
      __shared__ float s[32 * 33]; int t = threadIdx.x;
      s[t * stride] = x[8 * t]; __syncwarp(); y[t] = s[t * stride];
    }"""
    args = (np.ones(256, np.float32), executor.poisoned(32, np.float32), np.int32(stride))
    for schedule in SCHEDULES:
        profile = (
            executor.compile(source).kernel("k").launch((1,), (32,), args, schedule=schedule, profile=True).profile
        )
        assert profile is not None and profile.bank_conflicts == conflicts and profile.shared_accesses == 2
        assert (profile.sectors_loaded, profile.sectors_stored) == (32, 4)


@pytest.mark.parametrize("width", [64, 72])
def test_conflicts_of_vectors_and_ldmatrix(width: int) -> None:
    """Rows of 128 bytes put every row of a tile on the same banks; 16 more bytes spread them."""
    source = r"""extern "C" __global__ void k(unsigned* out) {
      __shared__ __align__(16) unsigned short s[8 * WIDTH]; int t = threadIdx.x;
      for (int i = t; i < 8 * WIDTH; i += 32) s[i] = i;
      __syncwarp();
      unsigned at = (unsigned)__cvta_generic_to_shared(s + t % 8 * WIDTH), f;
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(f) : "r"(at) : "memory");
      out[t] = f;
    }"""
    kernel = executor.compile(source, (f"-DWIDTH={width}",)).kernel("k")
    profile = kernel.launch((1,), (32,), (executor.poisoned(32, np.uint32),), profile=True).profile
    assert profile is not None and profile.bank_conflicts == (7 if width == 64 else 0)
