"""The progress bar: on terminals only, with the speeds of tokens."""

import io
import sys

import pytest

from engine import LLM
from engine.llm import prompt_progress
from engine.request.outputs import CompletionOutput, RequestOutput
from tests.llm.conftest import ScriptedEngine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_on_a_terminal(scripted: type[ScriptedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with LLM(model="m") as llm:
        llm.generate(["a", "b"], use_tqdm=False)
        assert screen.getvalue() == ""
        llm.generate(["a", "b"])
        assert "2/2" in screen.getvalue()
        assert "tok/s" in screen.getvalue()
        llm.chat([[{"role": "user", "content": "a"}]] * 3)
        assert "3/3" in screen.getvalue()


def test_no_progress_bar_elsewhere(scripted: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(model="m") as llm:
        llm.generate(["a", "b"], use_tqdm=True)
    assert capsys.readouterr() == ("", "")


def test_speeds_on_the_progress_bar_are_tokens_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    now = 100.0
    output = RequestOutput("r", None, [1] * 30, None, [CompletionOutput(i, token_ids=[1] * 5) for i in range(2)])
    with prompt_progress(1, show=True, clock=lambda: now) as advance:
        now += 2.0
        advance(output)
    assert "in 15 tok/s, out 5 tok/s" in screen.getvalue()
