"""Real templates against the prompt formats their models document, written out by hand."""

from datetime import datetime

import pytest

from engine.errors import ConfigError, InvalidRequest
from engine.text.chat import ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
QWEN_2_5 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""  # noqa: E501 (the shipped template's own line)

SPECIAL = {
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
}
USER = [{"role": "user", "content": "Hi there"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
TURNS = [*USER, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Proč 你好?"}]


def render(template: str, messages: object = USER, special: str = "", **kwargs: object) -> str:
    return ChatTemplate(template, SPECIAL.get(special, {})).render(messages, **kwargs)  # type: ignore[arg-type]


def test_smollm2() -> None:
    assert render(SMOLLM2) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(SMOLLM2, SYSTEM, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
    )


def test_llama_3() -> None:
    assert render(LLAMA_3, [SYSTEM[0], {"role": "user", "content": "  Hi there \n"}], "llama") == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_mistral() -> None:
    assert render(MISTRAL, TURNS, "mistral") == "<s>[INST] Hi there [/INST]Hello!</s>[INST] Proč 你好? [/INST]"


def test_gemma() -> None:
    assert render(GEMMA, TURNS, "gemma") == (
        "<bos><start_of_turn>user\nHi there<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
        "<start_of_turn>user\nProč 你好?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_qwen_2_5() -> None:
    assert render(QWEN_2_5) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen_2_5_with_tools() -> None:
    tool = {"type": "function", "function": {"name": "počasí", "description": "<b> & 'weather'"}}
    call = {"type": "function", "function": {"name": "počasí", "arguments": {"city": "České Budějovice"}}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "21 °C"},
    ]
    assert render(QWEN_2_5, messages, tools=[tool]) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools\n\n"
        '<tools>\n{"type": "function", "function": {"name": "počasí", "description": "<b> & \'weather\'"}}\n'
        "</tools><|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "počasí", "arguments": {"city": "České Budějovice"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\n21 °C\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_take_their_indentation_and_newline_with_them() -> None:
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n"
    assert render(template) == "Hi there\nend"


def test_loop_controls() -> None:
    template = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}"
    )
    assert render(template, TURNS) == "Hello!"


def test_generation_blocks_render_their_content() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}[{{ m.content }}]{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert render(template, TURNS) == "Hi there[Hello!]Proč 你好?"


def test_variables_set_in_a_generation_block_stay_in_it() -> None:
    assert render("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}") == "1False"


def test_strftime_now() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"


def test_tojson_options() -> None:
    template = "{{ messages | tojson(indent=2) }}|{{ {'b': 1, 'a': 'ž'} | tojson(sort_keys=true, ensure_ascii=true) }}"
    assert render(template) == (
        '[\n  {\n    "role": "user",\n    "content": "Hi there"\n  }\n]|{"a": "\\u017e", "b": 1}'
    )


def test_extra_variables_reach_the_template_but_do_not_replace_the_messages() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ documents }} {{ missing }}{{ messages[0].content }}", {})
    assert template.render(USER, enable_thinking=False) == "False None Hi there"


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (None, "non-empty list"),
        ([5], r"\[0\]: expected a mapping, found int"),
        ([{"content": "x"}], r"\[0\]\.role: expected a string, found None"),
        ([{"role": "user"}], r"\[0\]\.content: expected a string or a list of text parts, found NoneType"),
        ([*USER, {"role": 1, "content": 2}], r"\[1\]\.role: .*; \[1\]\.content: .* found int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"\[0\]\.content\[0\]: expected"),
        ([{"role": "user", "content": ["x"]}], r"\[0\]\.content\[0\]: expected"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages: object, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected) as caught:
        render(SMOLLM2, messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (MISTRAL, SYSTEM, "roles must alternate"),
        (GEMMA, SYSTEM, "System role not supported"),
        ("{{ messages[5].content.x }}", USER, "has no element 5"),
        ("{{ 1 / 0 }}", USER, "division"),
        ("{{ messages.append(1) }}", USER, "unsafe"),
        ("{{ ''.__class__.__mro__ }}", USER, "unsafe"),
        ("{{ range(10 ** 9) | list }}", USER, "too big|too large"),
    ],
)
def test_what_the_template_refuses(template: str, messages: object, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected) as caught:
        render(template, messages, "mistral")
    assert caught.value.field == "messages"


def test_broken_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})
