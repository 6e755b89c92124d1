"""The template environment and what it refuses; real templates are in test_templates.py."""

from datetime import datetime
from typing import Any

import pytest

from engine.errors import ConfigError, InvalidRequest
from engine.text.chat import ChatTemplate
from engine.text.chat_renderer import ChatRenderer
from tests.text.samples import byte_level

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

USER = [{"role": "user", "content": "Hi there"}]
TURNS = [*USER, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Proč 你好?"}]


def render(template: str, messages: object = USER, **kwargs: Any) -> str:
    return ChatTemplate(template, {}).render(messages, **kwargs)  # type: ignore[arg-type]


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


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content }}", "one\ntwo"),
        ("{{ messages[0].content | tojson }}", '"one\\ntwo"'),
        ("{{ '' + messages[0].content }}", "one\ntwo"),
    ],
    ids=["printed", "as JSON", "added"],
)
def test_text_parts_are_joined_by_newlines_where_a_string_is_expected(template: str, text: str) -> None:
    assert render(template, [{"role": "user", "content": PARTS}]) == text


def test_a_template_that_writes_out_parts_gets_them() -> None:
    template = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
    assert render(template, [{"role": "user", "content": PARTS}]) == "[one][two]"


def test_documents() -> None:
    template = "{% for d in documents %}{{ d.title }}: {{ d.text }};{% endfor %}{{ messages[0].content }}"
    documents = [{"title": "a", "text": "x"}, {"title": "b", "text": "y"}]
    assert render(template, documents=documents) == "a: x;b: y;Hi there"
    assert render("{{ documents is none }}") == "True"


@pytest.mark.parametrize("absent", [{}, {"tool_calls": None}, {"tool_calls": []}], ids=str)
def test_no_tool_calls_are_no_key(absent: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": "x", **absent}
    assert render("{{ 'tool_calls' in messages[0] }}", [message]) == "False"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
def test_no_content_beside_tool_calls_is_empty(content: dict[str, Any]) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}], **content}
    assert render("[{{ messages[0].content }}] {{ messages[0].tool_calls[0].function.name }}", [message]) == "[] f"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (None, "non-empty list"),
        ([5], r"\[0\]: expected a mapping, found int"),
        ([{"content": "x"}], r"\[0\]\.role: expected a string, found None"),
        ([{"role": "assistant", "tool_calls": []}], r"\[0\]\.content: expected a string or a list"),
        ([{"role": "user"}], r"\[0\]\.content: expected a string or a list of text parts, found NoneType"),
        ([*USER, {"role": 1, "content": 2}], r"\[1\]\.role: .*; \[1\]\.content: .* found int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"\[0\]\.content\[0\]: expected"),
        ([{"role": "user", "content": ["x"]}], r"\[0\]\.content\[0\]: expected"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages: object, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected) as caught:
        render(PLAIN, messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        ("{{ raise_exception('no system, please') }}", USER, "no system, please"),
        ("{{ messages[5].content.x }}", USER, "has no element 5"),
        ("{{ 1 / 0 }}", USER, "division"),
        ("{{ messages.append(1) }}", USER, "unsafe"),
        ("{{ ''.__class__.__mro__ }}", USER, "unsafe"),
        ("{{ range(10 ** 9) | list }}", USER, "too big|too large"),
    ],
)
def test_what_the_template_refuses(template: str, messages: object, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected) as caught:
        render(template, messages)
    assert caught.value.field == "messages"


def test_broken_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})


def test_a_template_of_the_request_in_place_of_the_models() -> None:
    own = ChatRenderer({"default": "own"}, {"bos_token": "<s>"})
    assert own.render(USER) == "own"
    assert own.render(USER, chat_template="{{ bos_token }}{{ x }}", chat_template_kwargs={"x": 1}) == "<s>1"
    with pytest.raises(InvalidRequest, match=r"chat_template: .*line 1"):
        own.render(USER, chat_template="{% if %}")
    with pytest.raises(InvalidRequest, match="messages: the model has no chat template"):
        ChatRenderer({}, {}).render(USER)


def test_a_variable_may_have_any_other_name() -> None:
    extra = {"self": 1, "template": 2, "args": 3}
    assert ChatRenderer({"default": "{{ template }}{{ args }}"}, {}).render(USER, chat_template_kwargs=extra) == "23"


def test_variables_that_have_a_parameter_of_their_own_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs: messages, tools cannot be set here"):
        ChatRenderer({"default": ""}, {}).render(USER, chat_template_kwargs={"tools": [], "messages": [], "x": 1})


def test_requests_with_tools_have_the_template_for_them() -> None:
    both = ChatRenderer({"default": "plain", "tool_use": "tools"}, {})
    assert both.render(USER) == both.render(USER, tools=None) == both.render(USER, tools=[]) == "plain"
    assert both.render(USER, tools=[{"name": "f"}]) == "tools"
    assert ChatRenderer({"default": "plain"}, {}).render(USER, tools=[{"name": "f"}]) == "plain"


def test_defaults_of_variables_are_under_those_of_a_request() -> None:
    chat = ChatRenderer({"default": "{{ x }}{{ y }}"}, {}, default_kwargs={"x": 1, "y": 2})
    assert chat.render(USER) == "12"
    assert chat.render(USER, chat_template_kwargs={"y": 3}) == "13"
    with pytest.raises(ConfigError, match="default_chat_template_kwargs: tools cannot be set here"):
        ChatRenderer({"default": ""}, {}, default_kwargs={"tools": []})


def test_control_text_of_a_message_can_be_kept_text() -> None:
    """An injected turn is one, as in vLLM, unless special tokens are escaped."""
    tokenizer = byte_level()  # <|end|> is special
    attack = [{"role": "user", "content": [{"type": "text", "text": "a<|end|>b"}]}]
    source = {"default": "{{ messages[0].content }}<|end|>{{ documents | tojson }}"}
    open_text = ChatRenderer(source, {}).render(attack)
    assert tokenizer.encode(open_text, add_special_tokens=False).count(0) == 2
    safe = ChatRenderer(source, {}, escaped=tokenizer.special_texts)
    text = safe.render(attack, documents=[{"<|end|>": "<|end|>"}])
    assert tokenizer.encode(text, add_special_tokens=False).count(0) == 1
    assert text.replace("\u2060", "") == 'a<|end|>b<|end|>[{"<|end|>": "<|end|>"}]'


@pytest.mark.parametrize("prefill", ["<", "im", "<|im", "user", "Sure: ", "\n", "x\n"])
def test_a_message_is_continued_where_it_ends(prefill: str) -> None:
    """Also where the template's text behind it has the same characters."""
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", {}
    )
    messages = [*USER, {"role": "assistant", "content": prefill}]
    expected = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n" + prefill
    if not prefill.strip():
        with pytest.raises(InvalidRequest, match="no text to continue"):
            template.render(messages, add_generation_prompt=False, continue_final_message=True)
    else:
        text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert text == expected
