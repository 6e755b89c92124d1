"""The grammar of a text that is tool calls: StructuredOutputs for a model that must call a tool, or may.

Every function's schema is a grammar of its own (`%json`), so that a reference in it finds its own root.
"""

import json
from collections.abc import Mapping
from typing import Any

from engine.grammar.grammar import JSON_OPTIONS
from engine.request.json_schema import compact
from engine.request.structured import StructuredOutputs
from engine.text.tool_formats import ToolFormat


def calls_grammar(
    format: ToolFormat,
    functions: Mapping[str, Mapping[str, Any]],
    *,
    several: bool,
    otherwise: Mapping[str, Any] | None = None,
) -> StructuredOutputs:
    """A constraint to calls of `functions`, written in `format`. Raises InvalidRequest, and RecursionError.

    Args:
        functions: by name, the JSON schema of the arguments.
        several: allow more than one call.
        otherwise: JSON schema of what the text may be in place of calls; None: it must be calls.
    """
    before, between, behind = format.around
    rest = f" ({json.dumps(between)} call)*" if several else ""
    calls = " ".join(filter(None, [before and json.dumps(before), f"call{rest}", behind and json.dumps(behind)]))
    rules = [
        f"start: {calls}" + ("" if otherwise is None else f" | {_json(otherwise)}"),
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    for i, (name, schema) in enumerate(functions.items()):
        head = format.head.replace("{}", json.dumps(name, ensure_ascii=False))
        rules.append(f'call_{i}: {json.dumps(head)} {_json(schema)} "}}"')
    return StructuredOutputs(grammar="\n".join(rules))


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + compact({"x-guidance": JSON_OPTIONS, **schema})
