"""How models write tool calls: the formats that `engine/text/tools.py` reads and a forced call is made of."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.text.chat import ChatTemplate, Message


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are set off from text.

    Attributes:
        opening, closing: markers around a call; the second may be missing.
        bare: a call at the start of the text, or right behind another, needs no opening.
        head: how a call begins, up to its arguments; `{}` is its name as JSON text. Behind the arguments comes `}`.
        around: what stands around the calls, and between two of them, where they are all of the text.
    """

    opening: str
    closing: str
    bare: bool
    head: str
    around: tuple[str, str, str]

    @property
    def written(self) -> re.Pattern[str]:
        """How a template writes the call of `_PROBE`."""
        marker = "" if self.bare else re.escape(self.opening) + r"\s*"
        return re.compile(marker + re.escape(self.head.replace("{}", '"probe"').rstrip()).replace(r"\ ", " ?"))


TOOL_FORMATS = {
    "hermes": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        False,
        '{"name": {}, "arguments": ',
        ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ),
    "llama3_json": ToolFormat("<|python_tag|>", ";", True, '{"name": {}, "parameters": ', ("", "; ", "")),
}
TOOL_PARSERS: Sequence[str] = tuple(TOOL_FORMATS)
"""The formats' names; they are vLLM's for `--tool-call-parser`."""

_PROBE = {"type": "function", "function": {"name": "probe", "arguments": {"x": 1}}}


def tool_format(template: ChatTemplate) -> str | None:
    """The format in which this template writes a call, and so its model too; None when none of TOOL_PARSERS is."""
    messages: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [_PROBE]},
    ]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except InvalidRequest:
        return None
    return next((name for name, format in TOOL_FORMATS.items() if format.written.search(text)), None)
