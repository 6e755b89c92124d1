"""A request's sampling fields as SamplingParams: OpenAI's, and vLLM's beyond them under the same names.

Types are checked here, ranges by SamplingParams itself. A field left out takes the model's default.
"""

import re
from typing import Any

from engine.errors import InvalidRequest
from engine.request.params import SamplingParams
from engine.request.structured import StructuredOutputs
from loader.generation import GenerationConfig
from rpc.http.fields import Fields
from rpc.sampling import LISTS, SCALARS, with_defaults

_OWN = {"max_tokens", "logprobs", "prompt_logprobs", "skip_special_tokens", "detokenize"}
"""Fields that an endpoint reads in a way of its own; text is always made."""
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
MAX_BIASES = 1 << 18
"""More than any vocabulary has tokens."""
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names of the fields of `structured_outputs`."""
_RESPONSE_SCHEMA = "response_format.json_schema.schema"


def sampling_params(
    fields: Fields,
    defaults: GenerationConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    constraint: StructuredOutputs | None = None,
    skip_special_tokens: bool = True,
) -> SamplingParams:
    """What `fields` ask for over `defaults`. Raises InvalidRequest naming the field.

    Args:
        max_tokens: None is as many as fit.
        constraint: goes before what `fields` say about the output's form.
        skip_special_tokens: where `fields` say nothing.
    """
    asked: dict[str, Any] = {
        **{name: fields.get(name, kind) for name, kind in SCALARS.items() if name not in _OWN},
        **{name: fields.list_of(name, kind) for name, kind in LISTS.items()},
        "stop": _stop(fields),
        "logit_bias": _logit_bias(fields),
        "structured_outputs": constraint or structured_outputs(fields),
        "skip_special_tokens": fields.flag("skip_special_tokens", skip_special_tokens),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    given = with_defaults(asked, defaults)
    return SamplingParams(**given, max_tokens=max_tokens)


def _stop(fields: Fields) -> str | list[str] | None:
    value = fields.raw("stop")
    return value if isinstance(value, str) else fields.list_of("stop", str)


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    biases = fields.child("logit_bias")
    if biases is None:
        return None
    values: dict[int, float] = {}
    if len(biases.as_dict()) > MAX_BIASES:
        fields.refuse("logit_bias", f"{len(biases.as_dict())} ids, at most {MAX_BIASES} are allowed")
    for token_id in biases.as_dict():
        if not _TOKEN_ID.fullmatch(token_id):
            fields.refuse("logit_bias", f"{token_id[:40]!r} is not a token id")
        values[int(token_id)] = biases.get(token_id, float) or 0.0
    return values


def constraint_names(fields: Fields) -> dict[str, str]:
    """What the caller called the constraint, by the engine's names."""
    names = {f"structured_outputs.{kind}": name for name, kind in _GUIDED.items() if fields.raw(name) is not None}
    if fields.raw("response_format") is not None:
        names["structured_outputs.json"] = _RESPONSE_SCHEMA
    return names


def structured_outputs(fields: Fields) -> StructuredOutputs | None:
    """The constraint of `response_format`, `structured_outputs` or a `guided_` field. Raises InvalidRequest."""
    found = {
        name: constraint
        for name, constraint in (
            ("response_format", _response_format(fields)),
            ("structured_outputs", _structured_outputs(fields)),
            *((name, _guided(fields, name)) for name in _GUIDED),
        )
        if constraint is not None
    }
    if len(found) > 1:
        raise InvalidRequest("structured_outputs", f"give one constraint, found {', '.join(found)}")
    return next(iter(found.values()), None)


def response_schema(fields: Fields) -> dict[str, Any] | None:
    """The JSON schema that `response_format` asks for, None where it asks for text. Raises InvalidRequest."""
    wanted = fields.child("response_format")
    if wanted is None:
        return None
    match wanted.get("type", str):
        case "text":
            return None
        case "json_object":
            schema = wanted.child("schema")  # together.ai's and llama.cpp's
            return {"type": "object"} if schema is None else schema.as_dict()
        case "json_schema":
            schema = (wanted.child("json_schema") or Fields({}, wanted.path("json_schema"))).child("schema")
            if schema is None:
                wanted.refuse("json_schema.schema", "is required")
            return schema.as_dict()
    wanted.refuse("type", "must be text, json_object or json_schema")


def _response_format(fields: Fields) -> StructuredOutputs | None:
    schema = response_schema(fields)
    return None if schema is None else StructuredOutputs(json=schema)


def _structured_outputs(fields: Fields) -> StructuredOutputs | None:
    wanted = fields.child("structured_outputs")
    if wanted is None:
        return None
    if wanted.raw("structural_tag") is not None:
        wanted.refuse("structural_tag", "is not supported")
    return StructuredOutputs(
        json_object=wanted.flag("json_object"),
        **{kind: _constraint(wanted, kind, kind) for kind in _GUIDED.values()},
    )


def _guided(fields: Fields, name: str) -> StructuredOutputs | None:
    value = _constraint(fields, name, _GUIDED[name])
    return None if value is None else StructuredOutputs(**{_GUIDED[name]: value})


def _constraint(fields: Fields, name: str, kind: str) -> Any:
    if kind == "choice":
        return fields.list_of(name, str)
    if kind == "json":
        if not isinstance(fields.raw(name), dict | str | None):
            fields.refuse(name, "must be a JSON schema: an object, or its text")
        return fields.raw(name)
    return fields.get(name, str)
