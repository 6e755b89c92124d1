"""ChatRenderer: a model's chat templates, and the rules around them, which every interface shares.

A request with tools is rendered by the template named "tool_use" where there is one, else by "default", as in
transformers. Text in a message that spells a special token becomes that token, as in vLLM: whoever writes a message
can end a turn and begin another. With `escaped` it stays text.
Read next: `engine/text/tokenizer.py`, `encode_rendered`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Unpack

from engine.errors import ConfigError, InvalidRequest
from engine.text.chat import ChatOptions, ChatTemplate, Message

DEFAULT, TOOL_USE = "default", "tool_use"
_WORD_JOINER = "\u2060"
"""Has no width and is no part of a special token: one behind its first character makes it text."""


class ChatRenderer:
    """Turns conversations into prompts.

    Args:
        sources: jinja2 sources by name.
        special_tokens: names and texts that templates refer to.
        default_kwargs: variables of every template, under those that a request gives.
        escaped: texts that stay text where messages, tools and documents have them.

    Raises ConfigError when a template does not compile or a default has a reserved name.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        default_kwargs: Mapping[str, Any] | None = None,
        escaped: Collection[str] = (),
    ) -> None:
        self._special_tokens = special_tokens
        self._templates = {
            name: ChatTemplate(sources[name], special_tokens) for name in (DEFAULT, TOOL_USE) if name in sources
        }
        self._default_kwargs = dict(default_kwargs or {})
        if taken := _reserved(self._default_kwargs):
            raise ConfigError(f"default_chat_template_kwargs: {taken} cannot be set here")
        longest_first = sorted(escaped, key=len, reverse=True)
        self._escaped = re.compile("|".join(map(re.escape, longest_first))) if escaped else None

    def template(self, *, for_tools: bool) -> ChatTemplate | None:
        """The model's template, None when it has none."""
        name = TOOL_USE if for_tools and TOOL_USE in self._templates else DEFAULT
        return self._templates.get(name)

    def render(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """The prompt text under the model's template, or the one in `options`. Raises InvalidRequest."""
        variables: dict[str, Any] = dict(options)
        source = variables.pop("chat_template", None)
        extra = variables.pop("chat_template_kwargs", None) or {}
        if taken := _reserved(extra):
            raise InvalidRequest("chat_template_kwargs", f"{taken} cannot be set here")
        template = self.template(for_tools=bool(variables.get("tools")))
        if source is not None:
            try:
                template = ChatTemplate(source, self._special_tokens)
            except ConfigError as error:
                raise InvalidRequest("chat_template", str(error)) from error
        if template is None:
            raise InvalidRequest("messages", "the model has no chat template")
        if self._escaped is not None:
            messages = self._as_text(messages)
            variables |= {name: self._as_text(variables[name]) for name in ("tools", "documents") if name in variables}
        return template.render(messages, **variables, **{**self._default_kwargs, **extra})

    def _as_text(self, value: Any) -> Any:
        """A copy of JSON values without a text in `escaped`."""
        assert self._escaped is not None
        if isinstance(value, str):
            return self._escaped.sub(lambda found: found[0][0] + _WORD_JOINER + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._as_text(key): self._as_text(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._as_text(item) for item in value]
        return value


def _reserved(names: Mapping[str, Any]) -> str:
    """Names of template variables that have a parameter of their own."""
    return ", ".join(sorted(names.keys() & {"messages", *ChatOptions.__annotations__}))
