"""More prompts than the engine's queue holds, from several threads, and what happens when one fails."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

import engine.llm
from engine import LLM
from engine.errors import InvalidRequest, RequestFault
from engine.request.outputs import RequestOutput
from engine.serving.stream import OutputChannel
from tests.llm.conftest import ScriptedEngine, echo, hang


def test_more_prompts_than_the_queue_holds(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m", max_queued_requests=3) as llm:
        outs = llm.generate([{"prompt_token_ids": [i, i, i]} for i in range(50)])
    assert [o.outputs[0].token_ids for o in outs] == [[i, i, i] for i in range(50)]
    assert [ids[0] for ids, _ in scripted.last.submitted] == list(range(50))
    assert scripted.last.most_live == 3


def test_the_bound_of_a_tenant_counts_as_well(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m", max_queued_requests=9, max_queued_requests_per_tenant=2) as llm:
        llm.generate([{"prompt_token_ids": [i]} for i in range(20)])
    assert scripted.last.most_live == 2


def test_calls_from_several_threads_share_the_queue(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m", max_queued_requests=2) as llm:
        results: dict[str, list[RequestOutput]] = {}
        threads = [threading.Thread(target=lambda c=c: results.update({c: llm.generate([c * 3] * 20)})) for c in "abc"]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert {c: [o.prompt for o in outs] for c, outs in results.items()} == {c: [c * 3] * 20 for c in "abc"}


def test_failing_prompt_raises_after_the_others_are_aborted(scripted: type[ScriptedEngine]) -> None:
    cause = OSError("broken pipe")

    def answer(engine: ScriptedEngine, channel: OutputChannel, prompt: list[int]) -> None:
        if prompt == [2]:
            error = RequestFault("no finite logits")
            error.__cause__ = cause
            engine.later(channel.fail, error)

    scripted.answer = answer
    with LLM(model="m", max_queued_requests=3) as llm:
        with pytest.raises(RequestFault, match="no finite logits") as caught:
            llm.generate([{"prompt_token_ids": [i]} for i in range(5)])
        assert caught.value.__cause__ is cause
        assert scripted.last.num_live == 0
        assert len(scripted.last.submitted) == 3
        scripted.answer = echo
        assert len(llm.generate(["a"] * 3)) == 3  # every slot came back


def test_refused_prompt_raises_after_the_others_are_aborted(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m", max_queued_requests=3) as llm:
        for n in range(1, 5):  # more often than there are slots
            scripted.answer = hang
            with pytest.raises(InvalidRequest, match="prompt: is empty") as caught:
                llm.generate(["a", "b", "", "c"])
            assert caught.value.__notes__ == ["in prompts[2]"]
            assert scripted.last.num_live == 0
            assert len(scripted.last.submitted) == 2 * n
        scripted.answer = echo
        assert len(llm.generate(["a"] * 4)) == 4


def test_interrupt_aborts_everything(scripted: type[ScriptedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = threading.Event()

    class Interrupted(Future[Any]):
        """The wait of a call that Ctrl-C interrupts. (A real signal is lost if it comes just before the wait.)"""

        def result(self, timeout: float | None = None) -> Any:
            submitted.wait()
            raise KeyboardInterrupt

    def answer(engine: ScriptedEngine, channel: OutputChannel, prompt: list[int]) -> None:
        if len(engine.submitted) == 4:
            submitted.set()

    scripted.answer = answer
    with LLM(model="m", max_queued_requests=4) as llm:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine.llm, "Future", Interrupted)
            llm.generate(["a"] * 6)
        assert scripted.last.num_live == 0
        assert len(scripted.last.submitted) == 4
        scripted.answer = echo
        assert len(llm.generate(["a"] * 6)) == 6
