"""LLM.generate: prompts and parameters in, results out."""

from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import InvalidRequest
from engine.request.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from engine.serving.stream import OutputChannel
from tests.llm.conftest import ScriptedEngine


def test_results_come_in_order_with_everything_the_deltas_said(scripted: type[ScriptedEngine]) -> None:
    top = {5: Logprob(-0.5, 1, "x")}

    def answer(_: ScriptedEngine, channel: OutputChannel, prompt: list[int]) -> None:
        first = Delta(0, "a", (5,), (top,), prompt_logprobs=(None, top), num_cached_tokens=16, cumulative_logprob=-0.5)
        channel.push(first)
        channel.push(Delta(0, "b", (6, 7), (top, top), "stop", "c", cumulative_logprob=-1.5))

    scripted.answer = answer
    with LLM(model="m") as llm:
        (out,) = llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(logprobs=0, prompt_logprobs=0))
    assert out == RequestOutput(
        request_id="r0",
        prompt=None,
        prompt_token_ids=[1, 2],
        prompt_logprobs=[None, top],
        outputs=[CompletionOutput(0, "ab", [5, 6, 7], [top] * 3, -1.5, "stop", "c")],
        num_cached_tokens=16,
    )


def test_choices_come_by_index(scripted: type[ScriptedEngine]) -> None:
    def answer(engine: ScriptedEngine, channel: OutputChannel, prompt: list[int]) -> None:
        deltas = [Delta(1, "x", (1,)), Delta(0, "a", (3,)), Delta(1, "y", (2,)), Delta(0, "b", (4,), None, "stop")]
        for delta in (*deltas, Delta(1, "", (), None, "length")):
            engine.later(channel.push, delta)

    scripted.answer = answer
    with LLM(model="m") as llm:
        (out,) = llm.generate("p", SamplingParams(n=2))
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in out.outputs] == [
        (0, "ab", [3, 4], "stop"),
        (1, "xy", [1, 2], "length"),
    ]


def test_prompts_of_every_kind(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m") as llm:
        outs = llm.generate(["ab", {"prompt": "c"}, {"prompt_token_ids": (100, 101)}])
        (alone,) = llm.generate("xyz")
        assert llm.generate([]) == []
    assert [(o.prompt, o.prompt_token_ids, o.outputs[0].text) for o in outs] == [
        ("ab", [97, 98], "<97><98>"),
        ("c", [99], "<99>"),
        (None, [100, 101], "<100><101>"),
    ]
    assert (alone.prompt, alone.outputs[0].token_ids, alone.outputs[0].finish_reason) == (
        "xyz",
        [120, 121, 122],
        "length",
    )
    assert (alone.num_cached_tokens, alone.prompt_logprobs, alone.outputs[0].logprobs) == (7, None, None)


def test_parameters_for_all_or_one_each(scripted: type[ScriptedEngine]) -> None:
    one, two = SamplingParams(temperature=0), SamplingParams(max_tokens=3)
    with LLM(model="m") as llm:
        llm.generate(["a", "b"])
        llm.generate(["c", "d"], one)
        llm.generate(["e", "f"], [one, two])
        with pytest.raises(InvalidRequest, match="sampling_params: 1 for 2 prompts"):
            llm.generate(["g", "h"], [one])
    assert [p for _, p in scripted.last.submitted] == [SamplingParams(), SamplingParams(), one, one, one, two]


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (5, "found int"),
        ({"prompt": 5}, r"found keys \['prompt'\]"),
        ({"prompt_token_ids": "12"}, "found keys"),
        ({"prompt": "a", "prompt_token_ids": [1]}, r"found keys \['prompt', 'prompt_token_ids'\]"),
        ([1, 2], "found list"),
    ],
)
def test_malformed_prompts_are_refused_before_anything_runs(
    scripted: type[ScriptedEngine], prompt: Any, found: str
) -> None:
    with LLM(model="m") as llm, pytest.raises(InvalidRequest, match=rf"prompts: \[1\]: expected .*{found}"):
        llm.generate(["a", prompt])
    assert scripted.last.submitted == []
