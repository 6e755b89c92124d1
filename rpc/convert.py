"""Between protobuf messages and the engine's own types; no I/O, no state."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from engine.errors import InvalidRequest
from engine.observe.snapshot import EngineStats
from engine.request.outputs import Delta, FinishReason, Logprob, TokenLogprobMap
from engine.request.params import SamplingParams
from engine.request.structured import StructuredOutputs
from engine.serving.stream import MERGE_TOKENS
from loader.generation import GenerationConfig
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.sampling import set_fields, with_defaults

FINISH_REASONS: dict[FinishReason, pb.FinishReason.ValueType] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}


def sampling_params(message: pb.SamplingParams, defaults: GenerationConfig) -> SamplingParams:
    """Raises InvalidRequest naming the field. What the model's folder says holds where nothing is given."""
    given = set_fields(message)
    if message.HasField("structured_outputs"):
        wanted = set_fields(message.structured_outputs)
        if "choice" in wanted:
            wanted["choice"] = tuple(message.structured_outputs.choice.texts)
        given["structured_outputs"] = StructuredOutputs(**wanted)
    return SamplingParams(**with_defaults(given, defaults))


def structured_outputs(wanted: StructuredOutputs) -> pb.StructuredOutputs:
    """The message that asks for it."""
    if wanted.choice is not None:
        return pb.StructuredOutputs(choice=pb.StructuredOutputs.Choice(texts=wanted.choice))
    return pb.StructuredOutputs(**{wanted.kind: getattr(wanted, wanted.kind)})


def chat_messages(message: pb.ChatMessages) -> list[dict[str, Any]]:
    """What a chat template takes: `{"role", "content"}` and what else is set. Raises InvalidRequest."""
    return [_chat_message(i, m) for i, m in enumerate(message.messages)]


def _chat_message(i: int, message: pb.ChatMessage) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    values |= {name: text for name in ("tool_call_id", "name") if (text := getattr(message, name))}
    if message.tool_calls:
        values["tool_calls"] = _objects(f"chat.messages[{i}].tool_calls", message.tool_calls)
    return values


def chat_tools(message: pb.ChatMessages) -> list[dict[str, Any]] | None:
    """The tools that the model may call. Raises InvalidRequest."""
    return _objects("chat.tools", message.tools) if message.tools else None


def _objects(field: str, text: str) -> list[dict[str, Any]]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"not JSON: {error}") from error
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InvalidRequest(field, "must be a JSON list of objects")
    return values


def delta_messages(delta: Delta) -> Iterator[pb.Delta]:
    """The wire form of one delta; a long prompt's logprobs come in messages of their own before it."""
    positions = delta.prompt_logprobs or ()
    last = max(0, len(positions) - 1) // MERGE_TOKENS * MERGE_TOKENS
    for start in range(0, last, MERGE_TOKENS):
        yield pb.Delta(index=delta.index, prompt_logprobs=_positions(positions[start : start + MERGE_TOKENS]))
    message = pb.Delta(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=_positions(delta.logprobs or ()),
        prompt_logprobs=_positions(positions[last:]),
        cumulative_logprob=delta.cumulative_logprob,
    )
    if delta.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[delta.finish_reason]
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    yield message


def stats_message(stats: EngineStats, *, tenant: str | None) -> pb.Stats:
    """The wire form of the engine's numbers, of its tenants only `tenant`'s unless that is None."""
    message = pb.Stats(**{f.name: getattr(stats, f.name) for f in pb.Stats.DESCRIPTOR.fields if f.name != "tenants"})
    for t in stats.tenants:
        if tenant in (None, t.tenant):
            message.tenants.add(tenant=t.tenant, num_running=t.num_running, num_waiting=t.num_waiting)
    return message


def _positions(maps: Iterable[TokenLogprobMap | None]) -> Iterable[pb.PositionLogprobs]:
    return (pb.PositionLogprobs(tokens=[_logprob(i, p) for i, p in (m or {}).items()]) for m in maps)


def _logprob(token_id: int, logprob: Logprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=token_id,
        logprob=logprob.logprob,
        rank=logprob.rank,
        decoded_token=logprob.decoded_token,
        token_bytes=logprob.token_bytes,
    )
