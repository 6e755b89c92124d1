"""ChatTemplate: chat messages to prompt text, as transformers renders them.

Same environment as transformers' `apply_chat_template`: sandboxed and immutable jinja2,
trim_blocks, lstrip_blocks, loop controls, `raise_exception`, `strftime_now`, `tojson` without
HTML escapes, `{% generation %}` blocks (marks for training, rendered as their content). One
difference, as in vLLM: a content given as a list of text parts is joined by newlines first,
because most templates expect a string.
Read next: `engine/text/tokenizer.py`, `encode_rendered`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]


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

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt text. `extra` are further variables of the template.

        Raises InvalidRequest("messages") for malformed messages and for whatever the template
        refuses.
        """
        variables = {
            "documents": None,
            **self._special_tokens,
            **extra,
            "messages": _checked_messages(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except Exception as e:  # a template is code: on messages it did not expect it may raise anything
            raise InvalidRequest("messages", f"the chat template refused them: {e}") from e


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


def _checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with list contents joined. Raises InvalidRequest that lists everything wrong."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages", "expected a non-empty list")
    checked: list[dict[str, Any]] = []
    problems: list[str] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            problems.append(f"[{i}]: expected a mapping, found {type(message).__name__}")
            continue
        if not isinstance(message.get("role"), str):
            problems.append(f"[{i}].role: expected a string, found {message.get('role')!r}")
        checked.append(dict(message))
        content = message.get("content")
        if content is None and "tool_calls" in message:
            continue
        try:
            checked[-1]["content"] = _text_of(content)
        except ValueError as e:
            problems.append(f"[{i}].content{e}")
    if problems:
        raise InvalidRequest("messages", "; ".join(problems))
    return checked


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f": expected a string or a list of text parts, found {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'[{i}]: expected {{"type": "text", "text": string}}')
        texts.append(part["text"])
    return "\n".join(texts)
