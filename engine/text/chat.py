"""ChatTemplate: chat messages to prompt text, as transformers renders them.

Same environment as transformers' `apply_chat_template`: sandboxed and immutable jinja2,
trim_blocks, lstrip_blocks, loop controls, `raise_exception`, `strftime_now`, `tojson` without
HTML escapes, `{% generation %}` blocks (marks for training, rendered as their content). Two
differences, as in vLLM: a content given as a list of text parts is joined by newlines first where
the template expects a string; no content beside tool calls is "", no tool calls are no `tool_calls`.
Arguments of tool calls go to the template as they come: some want a mapping, some JSON text.
Read next: `engine/text/chat_renderer.py`, which has those of a model.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ConfigError, InvalidRequest
from loader.errors import MAX_SHOWN, shown

Message = Mapping[str, Any]


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt; names are vLLM's. `ChatTemplate.render` says what they do.

    Attributes:
        chat_template: used in place of the model's own.
        chat_template_kwargs: further variables of the template.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


_PROBE = "a part of a message"


class ChatTemplate:
    """One compiled template.

    Args:
        template: the jinja2 source.
        special_tokens: names and texts that templates refer to, e.g. `bos_token`.
        now: the clock of `strftime_now`.

    Raises ConfigError when the template does not compile.
    """

    def __init__(
        self, template: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateSyntaxError as e:
            raise ConfigError(f"chat template: line {e.lineno}: {e.message}") from e
        self._special_tokens = dict(special_tokens)
        self._takes_parts = self._spells_parts()

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """The prompt text.

        Args:
            tools: what the model may call, as JSON schemas of functions.
            documents: what the answer may cite, e.g. `{"title", "text"}`.
            continue_final_message: end in the middle of the last message, for the model to go on with it.
            extra: further variables of the template, e.g. `enable_thinking`.

        Raises InvalidRequest("messages") for malformed messages and for whatever the template
        refuses.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest("continue_final_message", "cannot be combined with add_generation_prompt")
        checked = _checked_messages(messages, self._takes_parts)
        if continue_final_message:
            checked[-1] = _with_end(checked[-1])
        variables = {
            **extra,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._render(checked, variables)
        except Exception as e:  # a template is code: on messages it did not expect it may raise anything
            raise InvalidRequest("messages", f"the chat template refused them: {str(e)[:MAX_SHOWN]}") from e
        return _cut_at_end(text) if continue_final_message else text

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        return self._template.render({**self._special_tokens, **variables, "messages": messages})

    def _spells_parts(self) -> bool:
        """Whether the template itself writes out the parts of a content; one that expects a string prints the list."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._render([message], {"tools": None, "documents": None, "add_generation_prompt": False})
        except Exception:
            return False
        return _PROBE in text and repr(_PROBE) not in text and json.dumps(_PROBE) not in text


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` renders its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_END = uuid.uuid4().hex
"""Behind the last message's text, to find where it ends; nobody else can have written it."""


def _with_end(message: dict[str, Any]) -> dict[str, Any]:
    """The message with _END and a space behind its text; without the space again, the template strips contents."""
    content = message["content"]
    *parts, last = content if isinstance(content, list) else [{"text": content}]
    if not last["text"].strip():
        raise InvalidRequest("continue_final_message", "the last message has no text to continue")
    marked = f"{last['text']}{_END} "
    return {**message, "content": marked if isinstance(content, str) else [*parts, {**last, "text": marked}]}


def _cut_at_end(text: str) -> str:
    end = text.rfind(_END)
    if end < 0:
        raise InvalidRequest("continue_final_message", "the chat template does not show the last message as it is")
    return text[:end] if text.startswith(" ", end + len(_END)) else text[:end].rstrip()


def _checked_messages(messages: Sequence[Message], takes_parts: bool) -> list[dict[str, Any]]:
    """Messages as the template takes them. Raises InvalidRequest that lists everything wrong."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages", "expected a non-empty list")
    checked: list[dict[str, Any]] = []
    problems: list[str] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            problems.append(f"[{i}]: expected a mapping, found {type(message).__name__}")
            continue
        if not isinstance(message.get("role"), str):
            problems.append(f"[{i}].role: expected a string, found {shown(message.get('role'))}")
        checked.append({key: value for key, value in message.items() if key != "tool_calls" or value})
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""
        try:
            parts = _parts_of(content)
            checked[-1]["content"] = parts if takes_parts and not isinstance(content, str) else _joined(parts)
        except ValueError as e:
            problems.append(f"[{i}].content{e}")
    if problems:
        raise InvalidRequest("messages", "; ".join(problems))
    return checked


def _parts_of(content: object) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise ValueError(f": expected a string or a list of text parts, found {type(content).__name__}")
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'[{i}]: expected {{"type": "text", "text": string}}')
    return [{"type": "text", "text": part["text"]} for part in content]


def _joined(parts: Sequence[Mapping[str, str]]) -> str:
    return "\n".join(part["text"] for part in parts)
