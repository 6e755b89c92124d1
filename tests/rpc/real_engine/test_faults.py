"""R10: a fault of one request."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from engine.errors import StepFault
from engine.plan import SampleBatch, StepResult
from engine.schedule.settle import Settled
from engine.serving.live_request import LiveRequest
from tests.rpc.real_engine.conftest import Real, joined, over_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def outcome(call: grpc.aio.UnaryStreamCall) -> object:
    """The ids of the only choice, or the status."""
    try:
        return joined([d async for r in call for d in r.deltas])[0]["ids"]
    except grpc.aio.AioRpcError as error:
        return error.code()


class BrokenTicket:
    """A ticket whose result `spoil` replaces."""

    def __init__(self, ticket: Any, spoil: Callable[[StepResult], StepResult]) -> None:
        self._ticket = ticket
        self._spoil = spoil

    def done(self) -> bool:
        return self._ticket.done()

    async def result(self) -> StepResult:
        return self._spoil(await self._ticket.result())


def break_text(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the text of request "bad" fails at its fourth token."""
    original = LiveRequest._push_delta

    def push_delta(self: LiveRequest, choice: Any, settled: Settled, *more: Any) -> None:
        original(self, choice, settled, *more)
        sequence = settled.sequence
        if self.request_id == "bad" and (push_plain := sequence.push_plain) is not None:

            def push_or_fail(token_id: int) -> None:
                if sequence.num_output == 4:
                    raise ValueError("no such character")
                push_plain(token_id)

            sequence.push_plain = push_or_fail

    monkeypatch.setattr(LiveRequest, "_push_delta", push_delta)


def break_sampling(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of request "bad" hold nothing usable at its fourth token."""
    device, roster = real.engine._device, real.engine._loop.roster
    original = device.sample

    def sample(batch: SampleBatch) -> object:
        bad = [s.row for s in roster.running if s.request_id == "bad" and s.num_output == 3]
        faulted = np.isin(batch.rows, bad)
        return BrokenTicket(original(batch), lambda result: replace(result, faulted=result.faulted | faulted))

    monkeypatch.setattr(device, "sample", sample)


def break_step(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step that request "bad" is in fails as a whole."""
    device, roster = real.engine._device, real.engine._loop.roster
    original = device.sample
    failed: list[int] = []

    def fail(result: StepResult) -> StepResult:
        raise StepFault("an op failed")

    def sample(batch: SampleBatch) -> object:
        ticket = original(batch)
        if not failed and any(s.request_id == "bad" and s.num_output == 3 for s in roster.running):
            failed.append(batch.step)
            return BrokenTicket(ticket, fail)
        return ticket

    monkeypatch.setattr(device, "sample", sample)


@pytest.mark.parametrize("fault", [break_text, break_sampling, break_step])
async def test_a_fault_of_one_request_of_five(
    real: Real, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Real, pytest.MonkeyPatch], None]
) -> None:
    """It ends that request (or those of the step); the others and later ones get what they would have got."""
    prompts = [[5 + i, 6, 7] for i in range(5)]
    expected = [
        (await over_grpc(real, p, {"temperature": 0, "max_tokens": 16, "ignore_eos": True}))[0]["ids"] for p in prompts
    ]
    with monkeypatch.context() as patch:
        fault(real, patch)
        names = ["a", "b", "bad", "c", "d"]
        calls = [real.start(p, name, max_tokens=16) for p, name in zip(prompts, names, strict=True)]
        outcomes = await asyncio.gather(*map(outcome, calls))
    assert outcomes[2] is grpc.StatusCode.INTERNAL
    for got, wanted in zip(outcomes[:2] + outcomes[3:], expected[:2] + expected[3:], strict=True):
        assert got == wanted or (fault is break_step and got is grpc.StatusCode.INTERNAL)
    assert await outcome(real.start(prompts[2], "bad", max_tokens=16)) == expected[2]
