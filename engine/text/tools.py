"""Tool calls in a model's text: `tool_parser(format)` finds them while the text streams.

Plain text passes through at once, but for what could be the start of a marker. A call's name comes
out when it is complete, its arguments in pieces as they arrive. A call that turns out not to be one comes out as text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.errors import InvalidRequest
from engine.text.chat import ChatTemplate


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; `index` counts the calls of one text from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments; the pieces of one call concatenate."""

    index: int
    json_fragment: str


ToolEvent = TextDelta | ToolCallStart | ToolCallArguments


class ToolParser(Protocol):
    """Finds the calls in one text."""

    def feed(self, text: str) -> list[ToolEvent]:
        """What `text`, the continuation of the text so far, makes known."""
        ...

    def finish(self) -> list[ToolEvent]:
        """The text has ended: what was held back."""
        ...


class _Plain:
    def feed(self, text: str) -> list[ToolEvent]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[ToolEvent]:
        return []


TOOL_PARSERS: dict[str, Callable[[], ToolParser]] = {"hermes": _Plain, "llama3_json": _Plain}


def tool_parser(name: str) -> ToolParser:
    """A parser of the format `name`. Raises KeyError."""
    return TOOL_PARSERS[name]()


def tool_format(template: ChatTemplate) -> str | None:
    """The format in which this template writes a call, so the model does too; None when it is not one of TOOL_PARSERS."""
    call = {"type": "function", "function": {"name": _PROBE, "arguments": {"x": 1}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except InvalidRequest:
        return None
    return next((name for name, written in _WRITTEN.items() if re.search(written, text)), None)


_PROBE = "probe"
_WRITTEN = {
    "hermes": r'<tool_call>\s*\{"name": ?"probe", ?"arguments"',
    "llama3_json": r'\{"name": ?"probe", ?"parameters"',
}
