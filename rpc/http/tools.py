"""Tool calls of a chat request: what the model may call, what its text must then be, and how calls are found in it.

tool_choice      text must be                    found by
none             -                               -
auto             -                               the parser of the model's format
required         {"name": ..., "parameters": }   the same format's parser for bare JSON
a function       its arguments                   the whole text is the arguments
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.errors import InvalidRequest
from engine.request.structured import StructuredOutputs
from engine.text.tools import ToolCallArguments, ToolCallStart, ToolEvent, ToolParser, tool_parser
from rpc.http.fields import Fields

REQUIRED_FORMAT = "llama3_json"


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request.

    Attributes:
        schemas: what the chat template is shown, None for no tools.
        constraint: on the text, if it must be a call.
        make_parser: a parser for each choice, None where text is only text.
        one_call: calls behind the first are dropped.
        reads_markers: special tokens may mark a call, so they must be in the text.
        ends_in_calls: a choice with calls has the finish reason "tool_calls".
    """

    schemas: list[dict[str, Any]] | None = None
    constraint: StructuredOutputs | None = None
    make_parser: Callable[[], ToolParser] | None = None
    one_call: bool = False
    reads_markers: bool = False
    ends_in_calls: bool = True


def tools_of(fields: Fields, format: str | None, *, allow_auto: bool) -> Tools:
    """What `tools`, `tool_choice` and `parallel_tool_calls` say. Raises InvalidRequest.

    Args:
        format: how the model writes calls; None if that is not known.
        allow_auto: the model may decide by itself.
    """
    schemas = [_function_tool(tool) for tool in fields.children("tools") or ()]
    choice = _tool_choice(fields, schemas)
    if not schemas or choice == "none":
        return Tools()
    if choice == "auto":
        if not allow_auto or format is None:
            why = "--no-enable-auto-tool-choice" if format else "its chat template shows no format; --tool-call-parser"
            raise InvalidRequest("tool_choice", f'"auto" cannot be had from this server: {why}')
        one_call = not fields.flag("parallel_tool_calls", True)
        return Tools(schemas, None, partial(tool_parser, format), one_call, reads_markers=True)
    functions = {tool["function"]["name"]: _parameters(tool["function"]) for tool in schemas}
    if not isinstance(choice, _Named):
        constraint = StructuredOutputs(json=_any_call(functions))
        return Tools(schemas, constraint, partial(tool_parser, REQUIRED_FORMAT), one_call=True)
    constraint = StructuredOutputs(json=functions[choice.name])
    return Tools(schemas, constraint, partial(_NamedCall, choice.name), one_call=True, ends_in_calls=False)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


def _function_tool(tool: Fields) -> dict[str, Any]:
    if tool.get("type", str) != "function":
        tool.refuse("type", 'must be "function"')
    function = tool.child("function")
    if function is None:
        tool.refuse("function", "is required")
    if not function.get("name", str):
        function.refuse("name", "is required")
    function.get("description", str)
    parameters = function.child("parameters")
    if parameters is not None:
        parameters.child("$defs")
    return tool.as_dict()


def _tool_choice(fields: Fields, schemas: list[dict[str, Any]]) -> str | _Named:
    choice = fields.raw("tool_choice")
    if choice is None:
        return "auto" if schemas else "none"
    if choice in ("none", "auto", "required"):
        if choice != "none" and not schemas:
            fields.refuse("tool_choice", "needs tools")
        return str(choice)
    wanted = fields.child("tool_choice") if isinstance(choice, dict) else None
    function = wanted.child("function") if wanted is not None else None
    name = function.get("name", str) if function is not None else None
    if name is None:
        fields.refuse("tool_choice", "must be none, auto, required or an object that names a function")
    if name not in [tool["function"]["name"] for tool in schemas]:
        fields.refuse("tool_choice.function.name", f"{name!r} is not among the tools")
    return _Named(name)


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _any_call(functions: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The schema of a call of any of `functions`; their definitions move to its root, where references find them."""
    definitions: dict[str, Any] = {}
    calls = []
    for name, parameters in functions.items():
        for key, definition in (parameters.get("$defs") or {}).items():
            if definitions.setdefault(key, definition) != definition:
                raise InvalidRequest("tools", f"$defs {key!r} means different things in different tools")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "parameters": {k: v for k, v in parameters.items() if k != "$defs"},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions} if definitions else {"anyOf": calls}


class _NamedCall:
    """ToolParser of a text that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._start: list[ToolEvent] = [ToolCallStart(0, name)]

    def feed(self, text: str) -> list[ToolEvent]:
        events, self._start = self._start, []
        return [*events, ToolCallArguments(0, text)] if text else events

    def finish(self) -> list[ToolEvent]:
        return []
