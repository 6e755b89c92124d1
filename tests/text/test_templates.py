"""Templates of real models, against prompts written out by hand from the formats that their makers document.

Formats: Llama and Llama 3.1 from Meta's prompt format pages, Mistral from mistral-common's documentation, Qwen from
its function calling guide, gpt-oss from OpenAI's page on the harmony format, the others from their model cards.
Where the templates come from: tests/text/templates/README.md.
"""
# ruff: noqa: RUF001 (DeepSeek's marks are written with fullwidth bars)

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.text.chat import ChatTemplate

FOLDER = Path(__file__).parent / "templates"
SPECIAL_TOKENS = {
    "llama-3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "llama-3.1": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gemma-2": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "phi-3": {"bos_token": "<s>", "eos_token": "<|endoftext|>"},
    "aya-expanse": {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
    "deepseek-v3": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "mistral-v0.3": {"bos_token": "<s>", "eos_token": "</s>"},
    "mistral-small-3": {"bos_token": "<s>", "eos_token": "</s>"},
}


def template(name: str) -> ChatTemplate:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, SPECIAL_TOKENS.get(name, {}), now=lambda: datetime(2024, 7, 26))


SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "  Hello! "},  # some formats keep the spaces
    {"role": "user", "content": "Proč 你好?"},
]

CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
    "<|im_start|>assistant\n  Hello! <|im_end|>\n<|im_start|>user\nProč 你好?<|im_end|>\n"
)
LLAMA_TURNS = (
    "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nProč 你好?<|eot_id|>"
)
LLAMA_ANSWER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2024-07-26\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)

CONVERSATIONS = {
    "smollm2": (CHATML, "<|im_start|>assistant\n"),
    "qwen2.5": (CHATML, "<|im_start|>assistant\n"),
    "qwen2.5-training": (CHATML, "<|im_start|>assistant\n"),
    "qwen3": (CHATML, "<|im_start|>assistant\n"),
    "llama-3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n" + LLAMA_TURNS,
        LLAMA_ANSWER,
    ),
    "llama-3.1": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n" + LLAMA_TURNS,
        LLAMA_ANSWER,
    ),
    "phi-3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi there<|end|>\n<|assistant|>\n  Hello! <|end|>\n"
        "<|user|>\nProč 你好?<|end|>\n",
        "<|assistant|>\n",
    ),
    "aya-expanse": (
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi there<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hello!<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Proč 你好?<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "deepseek-v3": (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi there<｜Assistant｜>  Hello! <｜end▁of▁sentence｜>"
        "<｜User｜>Proč 你好?",
        "<｜Assistant｜><think>\n",
    ),
    "glm-4.5": (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi there<|assistant|>\n<think></think>\nHello!<|user|>\nProč 你好?",
        "<|assistant|>",
    ),
    "gpt-oss": (
        HARMONY + "<|end|><|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
        "<|start|>user<|message|>Hi there<|end|><|start|>assistant<|channel|>final<|message|>  Hello! <|end|>"
        "<|start|>user<|message|>Proč 你好?<|end|>",
        "<|start|>assistant",
    ),
    # From v3 on, the system prompt goes before the last user message.
    "mistral-v0.3": ("<s>[INST] Hi there[/INST] Hello!</s>[INST] Be brief.\n\nProč 你好?[/INST]", ""),
    "mistral-small-3": (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi there[/INST]  Hello! </s>[INST]Proč 你好?[/INST]",
        "",
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_with_a_system_message(name: str) -> None:
    text, answer = CONVERSATIONS[name]
    end = "<|endoftext|>" if name == "phi-3" else ""  # Phi-3 ends a text that is not to be continued
    assert template(name).render([SYSTEM, *TURNS], add_generation_prompt=False) == text + end
    assert template(name).render([SYSTEM, *TURNS]) == text + answer


def test_a_model_without_system_messages() -> None:
    gemma = template("gemma-2")
    text = (
        "<bos><start_of_turn>user\nHi there<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
        "<start_of_turn>user\nProč 你好?<end_of_turn>\n"
    )
    assert gemma.render(TURNS, add_generation_prompt=False) == text
    assert gemma.render(TURNS) == text + "<start_of_turn>model\n"
    with pytest.raises(InvalidRequest, match=r"messages: .*System role not supported"):
        gemma.render([SYSTEM, *TURNS])


@pytest.mark.parametrize("name", ["gemma-2", "aya-expanse", "mistral-v0.3"])
def test_turns_that_do_not_alternate_are_refused_where_the_template_says_so(name: str) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template(name).render([TURNS[0], TURNS[0]])


@pytest.mark.parametrize(
    ("name", "start"),
    [
        (
            "smollm2",
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n",
        ),
        (
            "qwen2.5",
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n",
        ),
        ("qwen3", "<|im_start|>user\nHi there"),
        ("llama-3", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi there"),
        ("aya-expanse", "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi there"),
        ("mistral-small-3", "<s>[SYSTEM_PROMPT]You are Mistral Small 3, "),
    ],
)
def test_without_a_system_message(name: str, start: str) -> None:
    assert template(name).render(TURNS).startswith(start)


def test_the_date_comes_from_strftime_now() -> None:
    assert "The current date is 2024-07-26." in template("mistral-small-3").render(TURNS)


def test_variables_that_only_some_templates_know() -> None:
    assert (
        template("qwen3")
        .render(TURNS, enable_thinking=False)
        .endswith("Proč 你好?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    )
    assert template("glm-4.5").render(TURNS[2:], enable_thinking=False) == (
        "[gMASK]<sop><|user|>\nProč 你好?/nothink<|assistant|>\n<think></think>"
    )
    assert "\n\nReasoning: high\n\n" in template("gpt-oss").render(TURNS, reasoning_effort="high")
    assert "Today Date: 1 Jan 2026\n" in template("llama-3.1").render(TURNS, date_string="1 Jan 2026")


def test_reasoning_of_earlier_turns_is_left_out() -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"}
    messages = [TURNS[0], thought, TURNS[2]]
    assert "<|im_start|>assistant\nHello!<|im_end|>\n" in template("qwen3").render(messages)
    assert "<｜Assistant｜>\n\nHello!<｜end▁of▁sentence｜>" in template("deepseek-v3").render(messages)


# -- tools ---------------------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name"}},
            "required": ["city"],
        },
    },
}
TOOL_JSON = (
    '{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Name"}}, '
    '"required": ["city"]}}}'
)
TOOL_JSON_INDENTED = """{
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {
                    "type": "string",
                    "description": "Name"
                }
            },
            "required": [
                "city"
            ]
        }
    }
}"""


def called(arguments: object) -> list[dict[str, Any]]:
    """A question, the model's call and the tool's answer."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather in Brno?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "21 °C"},
    ]


QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{TOOL_JSON}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call><|im_end|>\n<|im_start|>user\nWeather in Brno?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n21 °C\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
QWEN_2_5_TOOLS = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n" + QWEN_TOOLS
)

TOOL_PROMPTS = {
    "qwen2.5": QWEN_2_5_TOOLS,
    "qwen2.5-training": QWEN_2_5_TOOLS,
    "qwen3": "<|im_start|>system\n" + QWEN_TOOLS,
    "llama-3.1": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, please respond with a JSON for a "
        "function call with its proper arguments that best answers the given prompt.\n\n"
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
        f"Do not use variables.\n\n{TOOL_JSON_INDENTED}\n\nWeather in Brno?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "get_weather", "parameters": {"city": "Brno"}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"21 °C"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "mistral-v0.3": (
        f"<s>[AVAILABLE_TOOLS] [{TOOL_JSON}][/AVAILABLE_TOOLS][INST] Weather in Brno?[/INST]"
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Brno"}, "id": "abcdefghi"}]</s>'
        '[TOOL_RESULTS] {"content": 21 °C, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    ),
    "deepseek-v3": (
        "<｜begin▁of▁sentence｜><｜User｜>Weather in Brno?<｜Assistant｜><｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Brno"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
        "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>21 °C<｜tool▁output▁end｜>"
        "<｜tool▁outputs▁end｜>"
    ),
    "glm-4.5": (
        "[gMASK]<sop><|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{TOOL_JSON}\n</tools>"
        "\n\nFor each function call, output the function name and arguments within the following XML format:\n"
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
        "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
        "<|user|>\nWeather in Brno?<|assistant|>\n<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Brno</arg_value>\n</tool_call><|observation|>\n<tool_response>\n21 °C\n</tool_response>"
        "<|assistant|>"
    ),
    "gpt-oss": (
        HARMONY + "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n// Weather of a city\n"
        "type get_weather = (_: {\n// Name\ncity: string,\n}) => any;\n\n} // namespace functions<|end|>"
        "<|start|>user<|message|>Weather in Brno?<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Brno"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"21 °C"<|end|><|start|>assistant'
    ),
}


@pytest.mark.parametrize("name", TOOL_PROMPTS)
def test_tools_a_call_and_its_result(name: str) -> None:
    arguments = {"city": "Brno"}
    wanted = json.dumps(arguments) if name == "deepseek-v3" else arguments  # whose template takes JSON text
    assert template(name).render(called(wanted), tools=[TOOL]) == TOOL_PROMPTS[name]


def test_rules_of_a_template_about_tool_calls() -> None:
    messages = called({"city": "Brno"})
    call = messages[1]["tool_calls"][0]
    with pytest.raises(InvalidRequest, match="single tool-calls"):
        template("llama-3.1").render([messages[0], {"role": "assistant", "tool_calls": [call, call]}], tools=[TOOL])
    with pytest.raises(InvalidRequest, match="length 9"):
        template("mistral-v0.3").render([messages[0], {**messages[1], "tool_calls": [{**call, "id": "1"}]}])
    with pytest.raises(InvalidRequest, match="no previous assistant message"):
        template("gpt-oss").render(messages[2:])


# -- contents in parts, continued answers --------------------------------------------------------

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("smollm2", "<|im_start|>user\none\ntwo<|im_end|>"),
        ("qwen3", "<|im_start|>user\none\ntwo<|im_end|>"),
        ("llama-3.1", "<|end_header_id|>\n\none\ntwo<|eot_id|>"),
        ("gpt-oss", "<|start|>user<|message|>one\ntwo<|end|>"),
        # These templates write the parts out themselves.
        ("glm-4.5", "<|user|>\nonetwo<|assistant|>"),
        ("mistral-v0.3", "[INST] onetwo[/INST]"),
        ("mistral-small-3", "[INST]onetwo[/INST]"),
    ],
)
def test_parts_go_to_the_template_that_takes_them(name: str, shown: str) -> None:
    assert shown in template(name).render([{"role": "user", "content": PARTS}])


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("smollm2", "<|im_start|>assistant\nSure, here is "),
        ("llama-3", "<|start_header_id|>assistant<|end_header_id|>\n\nSure, here is"),  # which trims every content
        ("gemma-2", "<start_of_turn>model\nSure, here is"),
        ("mistral-v0.3", "[/INST] Sure, here is"),
        ("deepseek-v3", "<｜Assistant｜>Sure, here is "),
    ],
)
def test_going_on_with_the_last_message(name: str, end: str) -> None:
    messages = [TURNS[0], {"role": "assistant", "content": "Sure, here is "}]
    text = template(name).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith(end)


def test_going_on_with_a_message_in_parts() -> None:
    messages: list[Any] = [TURNS[0], {"role": "assistant", "content": PARTS}]
    text = template("glm-4.5").render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("\nonetwo")


def test_nothing_to_go_on_with() -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message: cannot be combined"):
        template("smollm2").render(TURNS, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="continue_final_message: the last message has no text"):
        template("smollm2").render(
            [{"role": "assistant", "content": " "}], add_generation_prompt=False, continue_final_message=True
        )
    with pytest.raises(InvalidRequest, match="continue_final_message: the chat template does not show"):
        ChatTemplate("{{ messages | length }}", {}).render(
            TURNS, add_generation_prompt=False, continue_final_message=True
        )
