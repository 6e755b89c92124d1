"""Tool calls of a chat request: what the model may call, what its text must then be, and how calls are found in it.

tool_choice      text must be                            found by
none             what response_format says               -
auto             calls, or what response_format says     the parser of the model's format
required         calls                                   the same
a function       its arguments                           the whole text is the arguments
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.errors import InvalidRequest
from engine.grammar.calls import calls_grammar
from engine.request.structured import StructuredOutputs
from engine.text.tool_formats import TOOL_FORMATS
from engine.text.tools import ToolCallArguments, ToolCallStart, ToolEvent, ToolParser, tool_parser
from rpc.http.fields import Fields
from rpc.http.sampling import response_schema

DEFAULT_FORMAT = "llama3_json"
"""Of calls that are forced, where the model's format is not known: it needs no markers."""


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
    """What `tools`, `tool_choice`, `parallel_tool_calls` and `response_format` say of calls. Raises InvalidRequest.

    Args:
        format: how the model writes calls; None if that is not known.
        allow_auto: the model may decide by itself.
    """
    for name, successor in (("functions", "tools"), ("function_call", "tool_choice")):
        if fields.raw(name) is not None:
            fields.refuse(name, f"is not supported: OpenAI has replaced it by {successor}")
    schemas = [_function_tool(tool) for tool in fields.children("tools") or ()]
    choice = _tool_choice(fields, schemas)
    if not schemas or choice.mode == "none":
        return Tools()
    functions = {tool["function"]["name"]: _parameters(tool["function"]) for tool in schemas}
    allowed = {name: functions[name] for name in choice.names} if choice.names else functions
    if choice.mode == "function":
        name, parameters = next(iter(allowed.items()))
        constraint = StructuredOutputs(json=parameters)
        return Tools(schemas, constraint, partial(_NamedCall, name), one_call=True, ends_in_calls=False)
    if choice.mode == "auto" and (not allow_auto or format is None):
        why = "--no-enable-auto-tool-choice" if format else "its chat template shows no format; --tool-call-parser"
        raise InvalidRequest("tool_choice", f'"auto" cannot be had from this server: {why}')
    format = format or DEFAULT_FORMAT
    several = fields.flag("parallel_tool_calls", True)
    return Tools(
        schemas,
        _constraint(fields, choice.mode, format, allowed, several),
        partial(tool_parser, format, allowed.keys()),
        one_call=not several,
        reads_markers=True,
    )


def _constraint(
    fields: Fields, mode: str, format: str, functions: Mapping[str, dict[str, Any]], several: bool
) -> StructuredOutputs | None:
    """What the text must be, if anything, so that it is calls or holds to the response's format."""
    otherwise = response_schema(fields) if mode == "auto" else None
    if mode == "auto" and otherwise is None:
        return None
    try:
        return calls_grammar(TOOL_FORMATS[format], functions, several=several, otherwise=otherwise)
    except RecursionError:
        raise InvalidRequest("tools", "a schema is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class _Choice:
    """`mode` is none, auto, required or function; `names` are the functions it is limited to, if it is."""

    mode: str
    names: tuple[str, ...] = ()


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


def _tool_choice(fields: Fields, schemas: list[dict[str, Any]]) -> _Choice:
    choice = fields.raw("tool_choice")
    if choice is None:
        return _Choice("auto" if schemas else "none")
    if choice in ("none", "auto", "required"):
        if choice != "none" and not schemas:
            fields.refuse("tool_choice", "needs tools")
        return _Choice(choice)
    wanted = fields.child("tool_choice") if isinstance(choice, dict) else None
    if wanted is not None and wanted.raw("type") == "allowed_tools":
        return _allowed_tools(wanted.child("allowed_tools") or wanted, schemas)
    if wanted is None or wanted.raw("function") is None:
        fields.refuse("tool_choice", "must be none, auto, required or an object: a function, or allowed_tools")
    return _Choice("function", (_known_name(wanted, schemas),))


def _allowed_tools(wanted: Fields, schemas: list[dict[str, Any]]) -> _Choice:
    mode, tools = wanted.get("mode", str), wanted.children("tools")
    if mode not in ("auto", "required"):
        wanted.refuse("mode", "must be auto or required")
    if not tools:
        wanted.refuse("tools", "at least one is required")
    return _Choice(mode, tuple(_known_name(tool, schemas) for tool in tools))


def _known_name(tool: Fields, schemas: list[dict[str, Any]]) -> str:
    function = tool.child("function") or Fields({}, tool.path("function"))
    name = function.get("name", str)
    if name is None:
        function.refuse("name", "is required")
    if name not in [schema["function"]["name"] for schema in schemas]:
        function.refuse("name", f"{name[:40]!r} is not among the tools")
    return name


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


class _NamedCall:
    """ToolParser of a text that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._start: list[ToolEvent] = [ToolCallStart(0, name)]

    def feed(self, text: str) -> list[ToolEvent]:
        events, self._start = self._start, []
        return [*events, ToolCallArguments(0, text)] if text else events

    def finish(self) -> list[ToolEvent]:
        return []
