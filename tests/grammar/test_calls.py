"""What forced calls and schemas allow: texts that the grammar takes to their end, or not."""

from typing import Any

import pytest

from engine.grammar.calls import calls_grammar
from engine.grammar.grammar import GrammarCompiler
from engine.request.structured import StructuredOutputs
from engine.text.tokenizer import TextTokenizer
from engine.text.tool_formats import TOOL_FORMATS
from tests.grammar.conftest import EOS

OBJECT = {"type": "object", "additionalProperties": False}
TREE = OBJECT | {"properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"]}
DEFINITIONS = OBJECT | {
    "properties": {"v": {"$ref": "#/definitions/n"}},
    "required": ["v"],
    "definitions": {"n": {"type": "integer"}},
}
PROPERTIES = OBJECT | {"properties": {"v": {"type": "integer"}, "w": {"$ref": "#/properties/v"}}, "required": ["v"]}
WITH_ID = OBJECT | {
    "$id": "http://example.com/s",
    "properties": {"v": {"$ref": "#/$defs/n"}},
    "required": ["v"],
    "$defs": {"n": {"type": "integer"}},
}
OTHER_N = OBJECT | {"properties": {"s": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "string"}}, "required": ["s"]}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "tree": TREE,
    "definitions": DEFINITIONS,
    "properties": PROPERTIES,
    "id": WITH_ID,
    'o"n': OTHER_N,
}


def accepts(compiler: GrammarCompiler, tokenizer: TextTokenizer, wanted: StructuredOutputs, text: str) -> bool:
    grammar = compiler.compile(wanted).fork()
    for token_id in [*tokenizer.encode(text, add_special_tokens=False), EOS]:
        if grammar.has_ended:
            return grammar.error is None and token_id == EOS
        grammar.advance(token_id)
    return grammar.error is None


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ('{"name": "tree", "parameters": {"v": 1, "next": {"v": 2}}}', True),
        ('{"name": "tree", "parameters": {"v": 1, "next": {"name": "tree", "parameters": {"v": 1}}}}', False),
        ('{"name": "definitions", "parameters": {"v": 1}}', True),
        ('{"name": "definitions", "parameters": {"v": "1"}}', False),
        ('{"name": "properties", "parameters": {"v": 1, "w": 2}}', True),
        ('{"name": "properties", "parameters": {"v": 1, "w": "2"}}', False),
        ('{"name": "id", "parameters": {"v": 1}}', True),
        ('{"name": "id", "parameters": {"v": "1"}}', False),
        ('{"name": "o\\"n", "parameters": {"s": "1"}}', True),
        ('{"name": "o\\"n", "parameters": {"s": 1}}', False),
        ('{"name": "other", "parameters": {"v": 1}}', False),
    ],
)
def test_references_keep_their_own_root(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, call: str, fits: bool
) -> None:
    wanted = calls_grammar(TOOL_FORMATS["llama3_json"], FUNCTIONS, several=True)
    assert accepts(compiler, tokenizer, wanted, call) == fits
    assert accepts(compiler, tokenizer, wanted, f"{call}; {call}") == fits
    wanted = calls_grammar(TOOL_FORMATS["hermes"], FUNCTIONS, several=False)
    marked = f"<tool_call>\n{call.replace('parameters', 'arguments', 1)}\n</tool_call>"
    assert accepts(compiler, tokenizer, wanted, marked) == fits
    assert not accepts(compiler, tokenizer, wanted, f"{marked}\n{marked}")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('<tool_call>\n{"name": "tree", "arguments": {"v": 1}}\n</tool_call>', True),
        ('{"s": "x"}', True),
        ('{"s": 1}', False),
        ("Sure.", False),
    ],
)
def test_calls_or_the_responses_format(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, text: str, fits: bool
) -> None:
    wanted = calls_grammar(TOOL_FORMATS["hermes"], FUNCTIONS, several=True, otherwise=OTHER_N)
    assert accepts(compiler, tokenizer, wanted, text) == fits


def test_descriptions_of_a_hundred_tools_do_not_count(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    parameters = {
        "type": "object",
        "description": "x" * 2000,
        "properties": {"title": {"type": "string", "title": "y" * 500, "default": {"a": [1]}}},
        "required": ["title"],
        "additionalProperties": False,
    }
    tools = {f"tool_{i}": parameters for i in range(100)}
    wanted = calls_grammar(TOOL_FORMATS["llama3_json"], tools, several=False)
    assert accepts(compiler, tokenizer, wanted, '{"name": "tool_77", "parameters": {"title": "a"}}')
    assert not accepts(compiler, tokenizer, wanted, '{"name": "tool_77", "parameters": {}}')


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        ({"type": "string", "format": "password"}, '"a b"', True),
        ({"type": "string", "format": "uuid4"}, '"a b"', True),
        ({"type": "string", "format": "binary"}, '"a b"', True),
        ({"type": "string", "format": "date"}, '"a b"', False),
        ({"type": "string", "format": "date"}, '"2026-12-01"', True),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]", True),
        ({"type": "object", "dependentRequired": {}, "unevaluatedProperties": True}, "{}", True),
        # names and values that look like keywords
        (OBJECT | {"properties": {"title": {"const": {"title": "x"}}}, "required": ["title"]}, "{}", False),
        (OBJECT | {"properties": {"title": {"const": {"title": "x"}}}}, '{"title": {"title": "x"}}', True),
        (OBJECT | {"properties": {"format": {"enum": ["password"]}}}, '{"format": "password"}', True),
    ],
)
def test_what_constrains_nothing_is_no_obstacle(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, schema: dict[str, Any], text: str, fits: bool
) -> None:
    assert accepts(compiler, tokenizer, StructuredOutputs(json=schema), text) == fits
