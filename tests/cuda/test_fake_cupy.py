"""The CuPy double: lazy streams show missing synchronisation, and nothing but copies, kernels and gemmEx is there."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cupy", reason="the executor compiles through CuPy's wrapper of NVRTC: install the extra test-cuda")

from tests.gpu_without_gpu import fake_cupy
from tests.gpu_without_gpu.executor import LaunchError
from tests.gpu_without_gpu.fake_cupy import Gpu, Settings

pytestmark = pytest.mark.cuda

SOURCE = r"""
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
extern "C" __global__ void scale(float* x, float by) { x[threadIdx.x] *= by; }
extern "C" __global__ void staged(float* x) { extern __shared__ float s[]; s[threadIdx.x] = x[threadIdx.x]; }
"""
N = 64
ONES = np.ones(N, np.float32)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with fake_cupy.installed(getattr(request, "param", Settings())) as gpu:
        yield gpu


@pytest.fixture
def cupy(gpu: Gpu) -> ModuleType:
    import cupy

    return cupy


def function(cupy: Any, name: str) -> Any:
    return cupy.RawModule(code=SOURCE).get_function(name)


def pinned(cupy: Any, values: NDArray[Any] = ONES) -> NDArray[Any]:
    host: NDArray[Any] = np.frombuffer(cupy.cuda.alloc_pinned_memory(values.nbytes), values.dtype, values.size)
    host[...] = values
    return host


def scale(cupy: Any, x: Any, by: float, stream: Any) -> None:
    function(cupy, "scale")((1,), (N,), (x, np.float32(by)), stream=stream)


def test_results_are_poison_until_waited_for(cupy: Any, gpu: Gpu) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    x, y, out = cupy.empty(N, np.float32), cupy.empty((N,), np.float32), pinned(cupy)
    x.set(pinned(cupy), stream=stream)
    function(cupy, "add")((1,), (N,), (x, x, y, np.int32(N)), stream=stream)
    y.get(stream=stream, out=out, blocking=False)
    assert np.isnan(out).all() and not gpu.launches
    stream.synchronize()
    assert (out == 2).all() and gpu.launches == {"add": 1}


def test_a_pinned_buffer_reused_too_early_is_seen(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    x, host = cupy.empty(N, np.float32), pinned(cupy)
    x.set(host, stream=stream)
    host[...] = 5  # the copy reads it later
    assert (x.get(stream=stream) == 5).all()
    pageable = ONES.copy()
    x.set(pageable, stream=stream)
    pageable[...] = 5  # CUDA has staged it
    assert (x.get(stream=stream) == 1).all()


def test_streams_are_ordered_by_events_only(cupy: Any) -> None:
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    x = cupy.empty(N, np.float32)
    x.set(ONES, stream=first)
    early = x.get(stream=second)
    assert np.isnan(early).all()  # nothing ordered the streams
    scale(cupy, x, 3, first)
    event = cupy.cuda.Event()
    event.record(first)
    second.wait_event(event)
    scale(cupy, x, 2, first)  # behind the event
    assert (x.get(stream=second) == 3).all()
    assert (x.get(stream=first) == 6).all()


def test_the_null_stream_orders_blocking_streams(cupy: Any) -> None:
    blocking, free = cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.empty(N, np.float32), cupy.empty(N, np.float32)
    x.set(ONES, stream=blocking)
    y.set(ONES, stream=free)
    assert (x.get() == 1).all() and np.isnan(y.get()).all()


def test_events(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    start, end, untimed = cupy.cuda.Event(), cupy.cuda.Event(), cupy.cuda.Event(disable_timing=True)
    assert end.done
    end.synchronize()
    start.record(stream)
    cupy.zeros(N, np.float32).data.memset_async(1, 8, stream)
    cupy.empty(N, np.float32).set(ONES, stream=stream)  # freed: the work still refers to it
    end.record(stream)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        end.synchronize()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        cupy.cuda.get_elapsed_time(start, untimed)


def test_polling_makes_progress(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    x, event = cupy.empty(N, np.float32), cupy.cuda.Event()
    for _ in range(3):
        x.set(ONES, stream=stream)
    event.record(stream)
    polls = 0
    while not event.done:
        polls += 1
        assert polls < 10
    assert polls == 2


def test_graphs_bake_scalars_and_read_memory_again(cupy: Any, gpu: Gpu) -> None:
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    x, host, fork, join = cupy.empty(N, np.float32), pinned(cupy), cupy.cuda.Event(), cupy.cuda.Event()
    kernel, by = function(cupy, "scale"), np.array([2.0], np.float32)
    stream.begin_capture()
    x.set(host, stream=stream)
    fork.record(stream)
    other.wait_event(fork)
    kernel((1,), (N,), (x, by[0]), stream=other)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        stream.synchronize()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="Unjoined"):
        stream.end_capture()
    join.record(other)
    stream.wait_event(join)
    graph = stream.end_capture()
    assert not gpu.launches
    by[0], host[...] = 100, 7
    graph.launch(stream)
    assert (x.get(stream=stream) == 14).all() and not other.is_capturing()
    graph.launch(stream)
    stream.synchronize()
    assert gpu.launches["scale"] == 2


def test_device_copies_memset_and_views(cupy: Any) -> None:
    x = cupy.asarray(np.arange(24, dtype=np.int32).reshape(4, 6))
    y = cupy.empty((4, 6), np.int32)
    y.data.copy_from_device_async(x.data, x.nbytes)
    y[2].data.memset_async(0, y[2].nbytes)
    expected = np.arange(24, dtype=np.int32).reshape(4, 6)
    expected[2] = 0
    assert np.array_equal(y.get(), expected)
    assert np.array_equal(
        cupy.asnumpy(y[1:3].reshape(-1)[4:8].view(np.uint16)), expected[1:3].ravel()[4:8].view(np.uint16)
    )
    assert y[1].data.ptr == y.data.ptr + 24 and (y.data + 24).ptr == y[1].data.ptr
    assert (y.shape, y.strides, y.nbytes, y.dtype, len(y)) == ((4, 6), (24, 4), 96, np.int32, 4)
    b = cupy.zeros((3,), ml_dtypes.bfloat16)
    assert b.get().dtype == ml_dtypes.bfloat16 and not b.get().astype(float).any()


def test_it_holds_no_mathematics(cupy: Any) -> None:
    x = cupy.zeros(4, np.float32)
    for attempt in (
        lambda: x + x,
        lambda: x.astype(np.int32),
        lambda: x.fill(1),
        lambda: x.sum(),
        lambda: x.copy(),
        lambda: cupy.ones(3),
        lambda: cupy.concatenate([x, x]),
        lambda: x[cupy.zeros(1, np.int32)],
        lambda: np.asarray(x),
        lambda: cupy.empty(3, ml_dtypes.float8_e4m3fn),
    ):
        with pytest.raises((AttributeError, NotImplementedError, TypeError)):
            attempt()


def test_arguments_of_launches_are_checked(cupy: Any) -> None:
    x = cupy.zeros(N, np.float32)
    add = function(cupy, "add")
    for args in ((x, x, x, N), (x, x, x, np.int64(N)), (x, x, x), (x, x, ONES, np.int32(N)), (x, x, x, np.float16(1))):
        with pytest.raises(TypeError):
            add((1,), (N,), args)
    with pytest.raises(ValueError, match="without work"):
        add((0,), (N,), (x, x, x, np.int32(N)))
    staged = function(cupy, "staged")
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="opted into"):
        staged((1,), (N,), (x,), shared_mem=64 << 10)
    staged.max_dynamic_shared_size_bytes = 64 << 10
    staged((1,), (N,), (x,), shared_mem=64 << 10)
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        staged.max_dynamic_shared_size_bytes = 200 << 10


def test_a_kernels_fault_comes_out_of_the_wait_and_sticks(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(N - 1, np.float32)
    scale(cupy, x, 2, stream)
    for _ in range(2):
        with pytest.raises(LaunchError, match="out of bounds"):
            stream.synchronize()


def test_faults_can_be_injected(cupy: Any, gpu: Gpu) -> None:
    gpu.inject("cudaErrorIllegalAddress")
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
        cupy.cuda.Stream().synchronize()


@pytest.mark.parametrize("gpu", [Settings(memory=1 << 20, compute_capability="90")], indirect=True)
def test_memory_runs_out_and_comes_back(cupy: Any) -> None:
    assert cupy.cuda.runtime.memGetInfo() == (1 << 20, 1 << 20)
    x = cupy.empty(200_000, np.float32)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="allocated so far: 800,256"):
        cupy.empty(100_000, np.float32)
    del x
    cupy.empty(250_000, np.float32)
    assert cupy.cuda.Device().compute_capability == "90"
    assert cupy.cuda.runtime.getDeviceProperties(0)["sharedMemPerBlockOptin"] == 227 << 10


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_gemm_ex(cupy: Any, gpu: Gpu, dtype: Any, transposed: bool) -> None:
    """out[m, n] = x[m, k] w[n, k]^T, row-major: for cuBLAS, which is column-major, out^T = w x^T."""
    from cupy.cuda.device import get_cublas_handle
    from cupy_backends.cuda.libs import cublas

    rng = np.random.default_rng(0)
    m, n, k = 5, 7, 9
    x, w = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)
    out = np.ones((m, n), np.float32)
    stored = w if transposed else np.ascontiguousarray(w.T)
    gx, gw, gout = cupy.asarray(x), cupy.asarray(stored), cupy.asarray(out)
    scalars = np.array([1.0, 2.0], np.float32)
    code = {"float16": 2, "bfloat16": 14, "float32": 0}[np.dtype(dtype).name]
    arguments = (
        get_cublas_handle(), int(transposed), 0, n, m, k, scalars.ctypes.data,
        gw.data.ptr, code, k if transposed else n, gx.data.ptr, code, k, scalars[1:].ctypes.data,
        gout.data.ptr, 0, n, 68, -1,
    )  # fmt: skip
    stream = cupy.cuda.Stream()
    with stream:
        cublas.gemmEx(*arguments)
    assert gpu.gemms == 0
    np.testing.assert_allclose(gout.get(), x.astype(float) @ w.astype(float).T + 2, rtol=1e-5, atol=1e-5)
    stream.begin_capture()
    with stream, pytest.raises(NotImplementedError):
        cublas.gemmEx(*arguments)


@pytest.mark.parametrize("gpu", [Settings(progress="eager")], indirect=True)
def test_eager_progress_overwrites_what_is_still_read(cupy: Any) -> None:
    x, out = cupy.zeros(N, np.float32), pinned(cupy)
    x.get(out=out, blocking=False)
    assert not out.any()


def test_the_real_cupy_comes_back() -> None:
    import cupy as real

    with fake_cupy.installed():
        import cupy

        assert cupy is not real
    import cupy as after

    assert after is real
