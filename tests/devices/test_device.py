"""The worker process seen from its parent: overlap, placeholders, faults, death of either side."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.devices import memory_facts, open_device, select_device
from engine.devices.cpu.device import CpuDevice
from engine.errors import ConfigError, DeviceFault, StepFault
from engine.plan import PLACEHOLDER, BlockUpdate, SampleBatch, StepPlan
from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.weights import plan_weights
from tests.conftest import GOLDEN
from tests.devices.driver import GREEDY, Driver, i32, open_executor

MODEL = GOLDEN / "llama"
PROMPT = [5, 77, 300, 12, 9]
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 512}
STATE = replace(GREEDY, num_logprobs=2)


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[CpuDevice]:
    config = EngineConfig(**LIMITS | {"model": str(MODEL), "dtype": "float32"} | settings)
    checkpoint = open_checkpoint(MODEL)
    device = await open_device(config, checkpoint, num_blocks=16, max_model_len=256)
    assert isinstance(device, CpuDevice)
    try:
        yield device
    finally:
        await device.close()


def prefill(step: int = 0, ids: list[int] = PROMPT) -> StepPlan:
    blocks = (BlockUpdate(0, 0, 0, tuple(range(16))),)
    return StepPlan(step, i32(0), i32(0), i32(len(ids)), i32(*ids), None, (STATE,), blocks, ())


def decode(step: int, position: int) -> StepPlan:
    return StepPlan(step, i32(0), i32(position), i32(1), i32(PLACEHOLDER), None, (), (), ())


def one(step: int) -> SampleBatch:
    return SampleBatch(step, i32(0), i32(0))


async def test_placeholders_with_steps_in_flight_give_the_executors_ids() -> None:
    checkpoint = open_checkpoint(MODEL)
    with open_executor(checkpoint.decoder, plan_weights(MODEL, checkpoint.decoder)) as executor:
        driver = Driver(executor)
        driver.add(0, PROMPT)
        expected = driver.run(0, chunk=64, outputs=8).sampled
    async with running() as device:
        device.forward(prefill())
        tickets = [device.sample(one(0))]
        got = []
        for step in range(1, 9):
            if step < 8:
                device.forward(decode(step, len(PROMPT) + step - 1))
                tickets.append(device.sample(one(step)))
            result = await tickets[step - 1].result()
            assert result.step == step - 1
            assert result.logprobs is not None
            assert result.logprobs.top_ids.shape == (1, 2)
            assert result.logprobs.ranks.tolist() == [1]
            got += result.token_ids.tolist()
    assert got == expected


async def test_launching_does_not_wait_and_results_come_in_order() -> None:
    async with running() as device:
        order: list[int] = []

        async def wait(number: int) -> None:
            await tickets[number].result()
            order.append(number)

        tickets = []
        for step, plan in enumerate([prefill(0), decode(1, 5), decode(2, 6)]):
            device.forward(plan)
            tickets.append(device.sample(one(step)))
        assert not any(ticket.done() for ticket in tickets)  # nothing can arrive before the loop runs
        await asyncio.gather(*(wait(n) for n in (2, 1, 0)))
        assert order == [0, 1, 2]


async def test_a_cancelled_waiter_does_not_cancel_the_step() -> None:
    async with running() as device:
        device.forward(prefill())
        ticket = device.sample(one(0))
        waiter = asyncio.ensure_future(ticket.result())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert (await ticket.result()).step == 0


@pytest.mark.parametrize(
    "plan, reason",
    [
        (prefill(ids=[1, 512]), "outside the vocabulary"),
        (decode(0, 256), "beyond max_model_len"),
        (StepPlan(0, i32(0), i32(0), i32(1), i32(1), None, (), (BlockUpdate(0, 0, 0, (16,)),), ()), "outside"),
    ],
)
async def test_a_wrong_plan_fails_its_step_only(plan: StepPlan, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with running() as device:
        device.forward(plan)
        with pytest.raises(StepFault, match=reason):
            await device.sample(one(0)).result()
        device.forward(prefill(1))
        assert (await device.sample(one(1)).result()).step == 1
    assert "ValueError" in capfd.readouterr().err


async def test_death_of_the_worker_fails_every_ticket_with_its_reason() -> None:
    async with running() as device:
        device.forward(prefill())
        await device.sample(one(0)).result()
        os.kill(device.pid, signal.SIGSTOP)
        device.forward(decode(1, 5))
        pending = device.sample(one(1))
        os.kill(device.pid, signal.SIGKILL)
        with pytest.raises(DeviceFault, match="killed by SIGKILL"):
            await pending.result()
        device.forward(decode(2, 6))
        with pytest.raises(DeviceFault, match="killed by SIGKILL"):
            await device.sample(one(2)).result()


async def test_close_is_idempotent_and_ends_the_worker_and_its_tickets() -> None:
    async with running() as device:
        device.forward(prefill())
        ticket = device.sample(one(0))
        await device.close()
        await device.close()
        with pytest.raises(DeviceFault, match="closed"):
            await ticket.result()
        with pytest.raises(ProcessLookupError):
            os.kill(device.pid, 0)


SCRIPT = """
import asyncio, sys
from tests.devices.test_device import running
async def main():
    async with running() as device:
        print(device.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def test_the_worker_ends_with_its_parent() -> None:
    """The worker holds the write end of a pipe: end of file means that no process has it any more."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    # stderr is what the worker inherits
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert parent.stdout is not None
    with parent.stdout, os.fdopen(read, "rb") as errors:
        assert int(parent.stdout.readline()) > 0
        parent.kill()
        parent.wait()
        assert errors.read() == b""


async def test_a_checkpoint_refused_in_the_worker_keeps_its_type(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(MODEL)
    (tmp_path / "model.safetensors").write_bytes(b"not a file")
    broken = replace(checkpoint, path=tmp_path)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        await open_device(EngineConfig(model=str(tmp_path), **LIMITS), broken, num_blocks=4, max_model_len=64)


async def test_dummy_weights_need_no_file(tmp_path: Path) -> None:
    async with running(load_format="dummy", dtype="auto") as device:
        assert device.info.dtype == "bfloat16"
        device.forward(prefill())
        result = await device.sample(one(0)).result()
        assert not result.faulted.any()


def test_memory_facts_add_up() -> None:
    checkpoint = open_checkpoint(MODEL)
    decoder = checkpoint.decoder
    facts = memory_facts("cpu", EngineConfig(model=str(MODEL), block_size=16, **LIMITS), checkpoint)
    values = 2 * decoder.num_hidden_layers * decoder.num_key_value_heads * decoder.head_dim
    assert facts.block == 16 * values * 2  # bfloat16
    parameters = plan_weights(MODEL, decoder).nbytes
    assert parameters <= facts.weights < 1.3 * parameters  # small panels pad more
    assert facts.available > 0
    assert 0 < facts.workspace < 1 << 28


@pytest.mark.parametrize(("is_there", "level"), [(True, "WARNING"), (False, "INFO")])
def test_only_a_machine_with_a_gpu_is_warned_that_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, is_there: bool, level: str
) -> None:
    monkeypatch.setattr("engine.devices.NVIDIA", (tmp_path / "none", tmp_path if is_there else tmp_path / "none"))
    with caplog.at_level("INFO", logger="engine"):
        assert select_device("auto") == "cpu"
    assert [r.levelname for r in caplog.records] == [level]


def test_auto_falls_back_where_cupy_cannot_make_its_cache() -> None:
    """It makes one when it is imported; a HOME that is no folder is an OSError there, if CuPy is installed at all."""
    code = "from engine.devices import select_device; print(select_device('auto'))"
    environment = os.environ | {"HOME": "/dev/null", "CUPY_CACHE_DIR": "/dev/null/cache"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "cpu\n"), done.stderr


def test_cuda_is_refused_in_one_line() -> None:
    assert select_device("auto") == select_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="cuda") as error:
        select_device("cuda")
    assert "\n" not in str(error.value)


def test_weights_are_packed_into_what_the_ledger_says() -> None:
    checkpoint = open_checkpoint(MODEL)
    facts = memory_facts("cpu", EngineConfig(model=str(MODEL), dtype="float32", **LIMITS), checkpoint)
    with open_executor(checkpoint.decoder, plan_weights(MODEL, checkpoint.decoder)) as executor:
        weights = executor.model._kept[0]
        embedding = np.prod((checkpoint.decoder.vocab_size, checkpoint.decoder.hidden_size)) * 2
        assert weights.nbytes + embedding <= facts.weights * 1.01


async def test_masks_and_history_reach_the_sampler() -> None:
    """A mask of three ids; the penalty counts tokens that the host has not seen yet."""
    mask = np.zeros((1, 16), np.uint32)
    mask[0, 2] = 0b111  # ids 64, 65, 66
    history: dict[str, Any] = {"token_ids": tuple(PROMPT), "prompt_len": len(PROMPT)}
    state = replace(STATE, frequency_penalty=50.0, logit_bias=((65, 9.0),), **history)
    async with running() as device:
        device.forward(replace(prefill(), row_states=(state,)))
        tickets = [device.sample(SampleBatch(0, i32(0), i32(0), mask))]
        for step in range(1, 6):
            device.forward(decode(step, len(PROMPT) + step - 1))
            tickets.append(device.sample(SampleBatch(step, i32(0), i32(0), mask)))
            if step > 1:
                await tickets[step - 2].result()
        ids = [int((await ticket.result()).token_ids[0]) for ticket in tickets]
    assert ids[0] == 65
    assert sorted(map(ids.count, (64, 65, 66))) == [2, 2, 2]
