"""Between protobuf messages and the engine's own types; no I/O, no state.

An unset field is left out, so that the default is written once, in `engine.request.SamplingParams`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.request import Delta, FinishReason, Logprob, SamplingParams, TokenLogprobMap
from rpc.proto.engine.v1 import engine_pb2 as pb

FINISH_REASONS: dict[FinishReason, pb.FinishReason.ValueType] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest naming the field."""
    return SamplingParams(**{field.name: _plain(value) for field, value in message.ListFields()})


def _plain(value: Any) -> Any:
    """A copy of a protobuf container, which would keep its message alive."""
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def chat_messages(message: pb.ChatMessages) -> list[dict[str, str]]:
    """What a chat template takes: one `{"role", "content"}` each."""
    return [{"role": m.role, "content": m.content} for m in message.messages]


def delta_message(delta: Delta) -> pb.Delta:
    """The wire form of one delta."""
    message = pb.Delta(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=_positions(delta.logprobs or ()),
        prompt_logprobs=_positions(delta.prompt_logprobs or ()),
    )
    if delta.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[delta.finish_reason]
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    return message


def _positions(maps: Iterable[TokenLogprobMap | None]) -> Iterable[pb.PositionLogprobs]:
    return (pb.PositionLogprobs(tokens=[_logprob(i, p) for i, p in (m or {}).items()]) for m in maps)


def _logprob(token_id: int, logprob: Logprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=token_id, logprob=logprob.logprob, rank=logprob.rank, decoded_token=logprob.decoded_token
    )
