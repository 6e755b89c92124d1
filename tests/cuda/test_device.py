"""CudaDevice through the CuPy double: steps in flight, faults, refusals, weights and state on the GPU."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.devices import memory_facts, open_device, select_device
from engine.devices.cuda.device import CudaDevice
from engine.devices.cuda.registry import KernelRegistry
from engine.devices.cuda.shape import CudaShape, cuda_shape
from engine.devices.memory import plan_memory
from engine.errors import ConfigError, DeviceFault, StepFault
from engine.plan import PLACEHOLDER, BlockUpdate, SampleBatch, StepPlan, StepResult
from loader.checkpoint import open_checkpoint
from loader.decoder import DecoderConfig
from loader.weights import LoadPlan, plan_weights
from tests.conftest import GOLDEN
from tests.cuda.generating import ARCH, gpu
from tests.devices.driver import GREEDY, Driver, LoudWeights, i32, open_executor
from tests.gpu_without_gpu import fake_cupy

pytest.importorskip("cupy", reason="the double stands on CuPy's NVRTC wrapper: install the extra test-cuda")
pytestmark = pytest.mark.cuda

MODEL = GOLDEN / "llama"
PROMPT = [5, 77, 300, 12, 9]
STATE = replace(GREEDY, num_logprobs=2)
DECODER = open_checkpoint(MODEL).decoder


def shape(**values: Any) -> CudaShape:
    limits = {"dtype": "bfloat16", "kv_int8": False, "weight_int8": False, "num_blocks": 32, "block_size": 16}
    rows = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return CudaShape(**{"decoder": DECODER, **limits, **rows, **values})


def weights() -> LoadPlan:
    return plan_weights(MODEL, DECODER)


@asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, **double: Any) -> AsyncIterator[tuple[CudaDevice, fake_cupy.Gpu]]:
    with gpu(monkeypatch, **double) as pretended:
        config = EngineConfig(model=str(MODEL), device="cuda", max_num_seqs=4, max_num_batched_tokens=32)
        device = await open_device(config, open_checkpoint(MODEL), num_blocks=16, max_model_len=128)
        assert isinstance(device, CudaDevice)
        try:
            yield device, pretended
        finally:
            await device.close()


def prefill(step: int = 0, ids: list[int] = PROMPT) -> StepPlan:
    blocks = (BlockUpdate(0, 0, 0, tuple(range(8))),)
    return StepPlan(step, i32(0), i32(0), i32(len(ids)), i32(*ids), None, (STATE,), blocks, ())


def decode(step: int, position: int) -> StepPlan:
    return StepPlan(step, i32(0), i32(position), i32(1), i32(PLACEHOLDER), None, (), (), ())


def one(step: int) -> SampleBatch:
    return SampleBatch(step, i32(0), i32(0))


class Waiting:
    """An executor whose `sample` waits for its results, for the Driver."""

    def __init__(self, of: Any) -> None:
        self.executor, self.shape, self.on_logits = of, of.shape, None

    def forward(self, plan: StepPlan) -> None:
        self.executor.on_logits = self.on_logits
        self.executor.forward(plan)

    def sample(self, batch: SampleBatch) -> StepResult:
        launched = self.executor.sample(batch)
        launched.wait()
        launched.release()
        return launched.result()


def executor(source: Any = None, **values: Any) -> Waiting:
    from engine.devices.cuda.executor import CudaExecutor

    return Waiting(CudaExecutor(shape(**values), source or weights(), KernelRegistry(ARCH)))


async def test_masks_that_are_known_only_after_the_forward_pass_reach_the_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of a constrained step: forward, the result of the step before, and with it the mask."""
    ids = [300]
    async with running(monkeypatch) as (device, _):
        ticket = None
        for step in range(4):
            device.forward(prefill() if step == 0 else decode(step, 4 + step))
            if ticket is not None:
                ids.append(int((await ticket.result()).token_ids[0]))
            mask = np.zeros((1, -(-DECODER.vocab_size // 32)), np.uint32)
            mask[0, (ids[-1] + 1) // 32] = 1 << (ids[-1] + 1) % 32
            ticket = device.sample(SampleBatch(step, i32(0), i32(0), mask))
    assert ids == [300, 301, 302, 303]


async def test_placeholders_with_steps_in_flight_give_the_executors_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu(monkeypatch):
        driver = Driver(executor())
        driver.add(0, PROMPT)
        expected = driver.run(0, chunk=64, outputs=4).sampled
    async with running(monkeypatch) as (device, _):
        tickets = []
        for step in range(4):
            device.forward(prefill() if step == 0 else decode(step, 4 + step))
            tickets.append(device.sample(one(step)))
            if step:
                result = await tickets[step - 1].result()
                assert result.step == step - 1 and tickets[step - 1].done()
        results = [await ticket.result() for ticket in tickets]
    assert [int(result.token_ids[0]) for result in results] == expected
    assert all(result.device_seconds > 0 for result in results)
    assert device.info.kind == "cuda" and device.info.dtype == "bfloat16"


async def test_a_wrong_plan_fails_its_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as (device, _):
        device.forward(prefill(0, [5, DECODER.vocab_size]))
        ticket = device.sample(one(0))
        with pytest.raises(StepFault, match="token ids 5 to 512 are outside the vocabulary"):
            await ticket.result()
        device.forward(prefill(1))
        assert (await device.sample(one(1)).result()).step == 1


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(prefill(), starts=i32(126)), "goes beyond max_model_len 128"),
        (replace(prefill(), num_tokens=i32(4)), "num_tokens add up to 4, 5 ids"),
        (replace(prefill(), block_updates=(BlockUpdate(0, 0, 0, (16,)),)), r"blocks 16 to 16 outside \[0, 16\)"),
    ],
)
async def test_what_kernels_do_not_check_is_refused(
    monkeypatch: pytest.MonkeyPatch, plan: StepPlan, message: str
) -> None:
    async with running(monkeypatch) as (device, double):
        device.forward(plan)
        with pytest.raises(StepFault, match=message):
            await device.sample(one(0)).result()
        assert not double.launches


@pytest.mark.parametrize("kind", ["OutOfMemoryError", "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"])
async def test_a_launch_without_memory_fails_its_step_alone(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What the pools held is given back, and the next step has it."""
    async with running(monkeypatch) as (device, _):
        cuda = sys.modules["cupy"].cuda
        errors: dict[str, Exception] = {
            "OutOfMemoryError": cuda.memory.OutOfMemoryError("Out of memory allocating 512 bytes"),
            "cudaErrorMemoryAllocation": cuda.runtime.CUDARuntimeError(kind),
            "CUDA_ERROR_OUT_OF_MEMORY": cuda.driver.CUDADriverError(kind),
        }

        def refuse(plan: StepPlan) -> None:
            raise errors[kind]

        with monkeypatch.context() as patch:
            patch.setattr(device._executor, "forward", refuse)
            device.forward(prefill(0))
        with pytest.raises(StepFault, match=r"the GPU is out of memory .*lower gpu_memory_utilization"):
            await device.sample(one(0)).result()
        device.forward(prefill(1))
        assert (await device.sample(one(1)).result()).step == 1


async def test_a_fault_of_the_gpu_is_told_to_every_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as (device, double):
        device.forward(prefill())
        first = device.sample(one(0))
        double.inject("cudaErrorIllegalAddress")
        device.forward(decode(1, 5))
        second = device.sample(one(1))
        for ticket in (first, second):
            with pytest.raises(DeviceFault, match="cuda device: cudaErrorIllegalAddress"):
                await ticket.result()
        device.forward(decode(2, 6))
        later = device.sample(one(2))
        assert later.done()
        with pytest.raises(DeviceFault, match="cudaErrorIllegalAddress"):
            await later.result()
    await device.close()


async def test_more_steps_than_slots_is_a_mistake_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu(monkeypatch):
        launching = executor().executor
        launching.forward(prefill())
        launching.sample(one(0))
        for step in (1, 2, 3):
            launching.forward(decode(step, 4 + step))
            launching.sample(one(step))
        with pytest.raises(RuntimeError, match="step 4: 4 steps are in flight already"):
            launching.forward(decode(4, 8))


async def test_no_room_on_the_gpu_is_said_with_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceFault, match=r"out of memory .*lower gpu_memory_utilization"):
        async with running(monkeypatch, memory=1 << 20):
            pass


def test_memory_facts_are_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(MODEL), device="cuda", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)
    with gpu(monkeypatch, memory=1 << 30) as double:
        facts = memory_facts("cuda", config, open_checkpoint(MODEL))
        assert facts.available == int(0.9 * (1 << 30))
        ledger = plan_memory(config, facts, 512)
        assert ledger.num_blocks == 8 * 8  # every row at its longest; the memory would hold more
        kept = executor(num_blocks=ledger.num_blocks, cublas=True)
        counted = facts.weights + facts.workspace + ledger.kv_bytes
        slots = 8 * 4 * (16 * 8 + 4 * 64 + 1024) + 4 * 4096  # four slots' words and results, the arena of rules
        assert counted <= double.used <= counted + slots + 512 * 80  # the pool rounds up
        del kept


def test_int8_pages_take_their_share_of_the_ledger() -> None:
    plain, small = shape(), shape(kv_int8=True)
    heads = 2 * 2 * 2 * 16  # keys and values, layers, KV heads, tokens
    assert plain.block_nbytes == heads * 64 * 2 and small.block_nbytes == heads * (64 + 4)


def test_int8_weights_are_the_rounded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the cpu device in float32 on weights rounded here, channel by channel."""

    class Rounded:
        names, nbytes = weights().names, weights().nbytes

        def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
            values = np.asarray(weights().tensor(name), np.float32)
            if name.endswith("_proj.weight"):
                scale = np.abs(values).max(axis=1, keepdims=True).astype(np.float64) / 127
                values = (np.rint(values / scale) * scale).astype(np.float32)
            return values

    state = replace(GREEDY, num_prompt_logprobs=0)
    with open_executor(DECODER, Rounded(), max_model_len=128) as cpu:
        driver = Driver(cpu)
        expected = driver.add(0, [*range(30, 60)], state)
        driver.step({0: 30}, prompt_logprobs=True)
    with gpu(monkeypatch):
        driver = Driver(executor(weight_int8=True))
        row = driver.add(0, [*range(30, 60)], state)
        driver.step({0: 30}, prompt_logprobs=True)
    differences = [row.logits[i] - expected.logits[i] for i in range(30)]
    assert np.abs(differences).max() < 0.6  # of a standard deviation of 6; unrounded weights are 1.6 away


def test_tiles_of_rows_and_many_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompt logits than a tile holds: log-probabilities are those of the logits themselves."""
    monkeypatch.setattr("engine.devices.cuda.shape.HEAD_ROWS", 8)
    with gpu(monkeypatch):
        driver = Driver(executor())
        row = driver.add(2, [*range(40, 61)], replace(GREEDY, num_prompt_logprobs=3, num_logprobs=1))
        result = driver.step({2: 21}, prompt_logprobs=True)
    table = result.prompt_logprobs
    assert table is not None and table.logprobs.shape == (20,) and table.top_ids.shape == (20, 3)
    for i in range(20):
        logits = row.logits[i].astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        order = np.lexsort((np.arange(len(logits)), -logits))
        assert table.top_ids[i].tolist() == order[:3].tolist()
        assert np.allclose(table.top_logprobs[i], logprobs[order[:3]], atol=1e-4)
        assert np.isclose(table.logprobs[i], logprobs[41 + i], atol=1e-4)
        assert table.ranks[i] == 1 + order.tolist().index(41 + i)


def test_windowed_layers_use_their_own_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two KV groups that share page arrays, biases and a head of its own, against the cpu device."""
    decoder = replace(
        DECODER, layer_windows=(None, 8), attention_bias=True, attention_output_bias=True, mlp_bias=True,
        hidden_size=72, num_attention_heads=6,
        num_key_value_heads=2, intermediate_size=88, vocab_size=203,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    ids, state = rng.integers(0, 203, 40).tolist(), replace(GREEDY, num_prompt_logprobs=0)
    source = LoudWeights(decoder)

    def on_cpu(decoder: DecoderConfig) -> NDArray[np.float32]:
        with open_executor(decoder, source, dtype="bfloat16", max_model_len=128) as cpu:
            driver = Driver(cpu)
            row = driver.add(0, ids, state)
            driver.step({0: 40}, prompt_logprobs=True)
            return np.array([row.logits[i] for i in range(40)])

    expected, unwindowed = on_cpu(decoder), on_cpu(replace(decoder, layer_windows=(None, None)))
    with gpu(monkeypatch):
        driver = Driver(executor(source, decoder=decoder), seed=5)
        row = driver.add(1, ids, state)
        driver.step({1: 23}, prompt_logprobs=True)
        driver.step({1: 17}, prompt_logprobs=True)
    differences = np.abs([row.logits[i] for i in range(40)] - expected).max(axis=1)
    assert differences.max() < 0.2 * expected.std()
    assert np.abs(unwindowed - expected).max() > expected.std()


def test_uploads_in_many_chunks_overtake_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 KiB: each is used dozens of times, and a copy that is queued reads its chunk late."""
    monkeypatch.setattr("engine.devices.cuda.upload.CHUNK_BYTES", 4096)
    from engine.devices.cuda.weights import Weights

    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal((48, 40)).astype(ml_dtypes.bfloat16) for name in ("gate", "up", "down")}

    class Source:
        names, nbytes = tuple(tensors), 3 * 48 * 40 * 2
        tensor = staticmethod(tensors.__getitem__)

    with gpu(monkeypatch, progress="lazy"):
        import cupy

        loading = Weights(Source(), shape(), cupy.cuda.Stream(non_blocking=True))
        side_by_side = loading.linear(["gate", "down", "up"], [])
        interleaved = loading.linear(["gate", "up"], [], interleaved=True)
        loading.finish()
        got, mixed = side_by_side.values.get(), interleaved.values.get()
    assert np.array_equal(got, np.concatenate([tensors[name] for name in ("gate", "down", "up")]))
    for row in range(96):
        name, place = ("gate", "up")[row // 8 % 2], row // 16 * 8 + row % 8
        assert np.array_equal(mixed[row], tensors[name][place]), row


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4000)), max_size=25))
def test_regions_of_rules_never_overlap(steps: list[tuple[int, int]]) -> None:
    from engine.devices.cuda.rules import RuleArena

    with fake_cupy.installed():
        import cupy

        stream, arena, held = cupy.cuda.Stream(), RuleArena(), dict[int, np.ndarray[Any, Any]]()
        rng, firsts = np.random.default_rng(0), dict[int, int]()
        for row, length in steps:
            firsts[row] = arena.place(row, length, stream)
            held[row] = rng.integers(0, 1 << 30, length, np.int32)
            arena.words[firsts[row] : firsts[row] + length].set(held[row], stream=stream)
        words = arena.words.get(stream=stream)
    for row, values in held.items():
        assert np.array_equal(words[firsts[row] : firsts[row] + len(values)], values)


# -- choosing the device --------------------------------------------------------------------------


def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)


def pretending(**values: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = ModuleType("runtime")
        facts = {"driver": 13000, "runtime": 13020, "count": 1, "capability": "90"} | values
        runtime.driverGetVersion = lambda: facts["driver"]  # type: ignore[attr-defined]
        runtime.runtimeGetVersion = lambda: facts["runtime"]  # type: ignore[attr-defined]
        runtime.getDeviceCount = lambda: facts["count"]  # type: ignore[attr-defined]
        runtime.CUDARuntimeError = RuntimeError  # type: ignore[attr-defined]
        cupy, cuda = ModuleType("cupy"), ModuleType("cuda")
        cupy.cuda = cuda  # type: ignore[attr-defined]
        cuda.runtime = runtime  # type: ignore[attr-defined]
        cuda.Device = lambda: type("Device", (), {"compute_capability": facts["capability"]})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupy", cupy)

    return install


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (no_cupy, r"needs CuPy .*install engine-llm\[cuda13\]"),
        (pretending(driver=0), "needs an NVIDIA driver"),
        (pretending(driver=12040), r"the driver is for CUDA 12\.4, this CuPy needs 13\.0 .*engine-llm\[cuda12\]"),
        (pretending(count=0), "finds no GPU; check CUDA_VISIBLE_DEVICES"),
        (pretending(capability="75"), "compute capability 75, the kernels need 80"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    machine: Callable[[pytest.MonkeyPatch], None],
    message: str,
) -> None:
    machine(monkeypatch)
    caplog.set_level("INFO", logger="engine.devices")
    with pytest.raises(ConfigError, match=message) as error:
        select_device("cuda")
    assert "\n" not in str(error.value)
    assert select_device("auto") == "cpu"
    assert len(caplog.records) == 1 and str(error.value) in caplog.text
    assert select_device("cpu") == "cpu" and len(caplog.records) == 1


def test_auto_is_cuda_where_it_works(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pretending()(monkeypatch)
    assert select_device("auto") == select_device("cuda") == "cuda"
    assert not caplog.records


def test_what_the_kernels_cannot_do_is_listed() -> None:
    config = EngineConfig(model="m", dtype="float32")
    decoder = replace(DECODER, head_dim=66, intermediate_size=100)
    with pytest.raises(ConfigError, match=r"float32.*head_dim: 66.*intermediate_size: 100"):
        cuda_shape(config, decoder, num_blocks=1, max_model_len=64)
