"""LLM.chat and LLM.encode."""

from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import InvalidRequest
from loader.generation import GenerationConfig
from tests.llm.conftest import ScriptedEngine
from tests.text import samples

USER = {"role": "user", "content": "ab"}


def test_chat_of_one_conversation(scripted: type[ScriptedEngine]) -> None:
    params = SamplingParams(max_tokens=3)
    with LLM(model="m") as llm:
        (out,) = llm.chat([{"role": "system", "content": "S"}, USER], params)
    assert (out.prompt, out.prompt_token_ids) == ("sSuab>", [1, *map(ord, "sSuab>")])
    assert scripted.last.submitted == [(out.prompt_token_ids, params)]
    assert out.outputs[0].text == "<1><115><83><117><97><98><62>"


def test_chat_of_several_conversations(scripted: type[ScriptedEngine]) -> None:
    one, two = SamplingParams(temperature=0), SamplingParams(max_tokens=3)
    with LLM(model="m") as llm:
        outs = llm.chat(
            [[USER], [USER, {"role": "assistant", "content": "c"}]], [one, two], add_generation_prompt=False
        )
        assert llm.chat([]) == []
        with pytest.raises(InvalidRequest, match="sampling_params: 1 for 2 messages"):
            llm.chat([[USER], [USER]], [one])
    assert [o.prompt for o in outs] == ["uab", "uabac"]
    assert [p for _, p in scripted.last.submitted] == [one, two]


def test_chat_options_reach_the_template(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m") as llm:
        (tools,) = llm.chat([USER], tools=[{}, {}], chat_template_kwargs={"x": "!"})
        (template,) = llm.chat([USER], chat_template="{{ messages[0].role }}")
        (more,) = llm.chat([USER], add_generation_prompt=False, continue_final_message=True, tools=[{}])
    assert (tools.prompt, template.prompt, more.prompt) == ("uab2!>", "user", "uab")


@pytest.mark.parametrize(
    ("messages", "says", "note"),
    [
        ([{"role": "user"}], "content", "in messages[0]"),
        ([[USER], [{"content": "x"}]], "role", "in messages[1]"),
        ([[USER], "hi"], "non-empty list", "in messages[1]"),
        ([[USER], []], "non-empty list", "in messages[1]"),
    ],
    ids=str,
)
def test_malformed_conversations_are_refused_by_place(
    scripted: type[ScriptedEngine], messages: Any, says: str, note: str
) -> None:
    with LLM(model="m") as llm:
        with pytest.raises(InvalidRequest, match=f"messages: .*{says}") as caught:
            llm.chat(messages)
        assert caught.value.__notes__ == [note]
        assert scripted.last.num_live == 0
        with pytest.raises(InvalidRequest, match="messages: expected a list, found int"):
            llm.chat(5)  # type: ignore[arg-type]


def test_encode(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m") as llm:
        ids = samples.byte_level().encode("Hello world!")
        assert llm.encode("Hello world!") == ids
        assert llm.encode(["Hello world!", ""]) == [ids, []]
        assert llm.get_tokenizer().decode(ids) == "Hello world!"
        scripted.last.tokenizer = samples.metaspace()
        assert [len(llm.encode("Hello", add_special_tokens=add)) for add in (True, False)] == [2, 1]
        with pytest.raises(InvalidRequest, match="prompt: expected str, found int"):
            llm.encode([5])  # type: ignore[list-item]
        scripted.last.tokenizer = None
        with pytest.raises(InvalidRequest, match="tokenizer: the model has none"):
            llm.encode("a")


def test_without_parameters_the_models_defaults_hold(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m") as llm:
        scripted.last.checkpoint.generation = GenerationConfig(temperature=0.5, top_k=7)
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
        llm.chat([USER])
        llm.chat([USER], SamplingParams(top_k=3))
        assert [params for _, params in scripted.last.submitted] == [
            SamplingParams(temperature=0.5, top_k=7),
            SamplingParams(top_k=3),
        ]
