"""OpenAI's `usage`, and what a stream says of it when."""

from dataclasses import dataclass
from typing import Any

from rpc.http.fields import Fields
from rpc.outputs import Outputs, Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    """The object that OpenAI's answers have."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """`stream_options` of a request.

    Attributes:
        include: one more chunk, without choices, has the usage; the others have null.
    """

    include: bool = False

    @classmethod
    def of(cls, fields: Fields) -> "UsageOptions":
        """Raises InvalidRequest."""
        options = fields.child("stream_options")
        if options is None:
            return cls()
        if not fields.flag("stream"):
            fields.refuse("stream_options", "needs stream")
        return cls(include=options.flag("include_usage"))

    def chunk(self, head: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk with choices."""
        chunk = {**head, "choices": choices}
        return {**chunk, "usage": None} if self.include else chunk

    def last_chunks(self, head: dict[str, Any], outputs: Outputs) -> list[dict[str, Any]]:
        """What follows the last choice."""
        return [{**head, "choices": [], "usage": usage_body(outputs.usage)}] if self.include else []
