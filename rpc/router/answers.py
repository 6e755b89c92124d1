"""What the engine answers, as the router's messages; no I/O, no state.

A chunk holds what is new. The message that ends a choice repeats the last delta when chunks came
before it, as vLLM's does, and holds everything when none did.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine.request.outputs import Delta, TokenLogprobMap
from engine.request.params import SamplingParams


class Answers:
    """Makes the messages of one request."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt_token_ids = prompt_token_ids

    def chunk(self, delta: Delta) -> pb.GenerateResponse:
        """What a choice gained."""
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(token_ids=delta.token_ids, **self._common(delta)),
        )

    def complete(self, delta: Delta) -> pb.GenerateResponse:
        """The end of a choice."""
        complete = pb.GenerateComplete(
            output_ids=delta.token_ids, finish_reason=delta.finish_reason or "error", **self._common(delta)
        )
        if isinstance(delta.stop_reason, str):
            complete.matched_stop_str = delta.stop_reason
        elif delta.stop_reason is not None:
            complete.matched_token_id = delta.stop_reason
        return pb.GenerateResponse(complete=complete)

    def _common(self, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": delta.index,
            "prompt_tokens": len(self._prompt_token_ids),
            "completion_tokens": len(delta.token_ids),
            "cached_tokens": delta.num_cached_tokens,
        }
        if delta.logprobs:
            fields["output_logprobs"] = pb.OutputLogProbs(
                token_ids=[next(iter(entry)) for entry in delta.logprobs],
                token_logprobs=[next(iter(entry.values())).logprob for entry in delta.logprobs],
                top_logprobs=_tops(delta.logprobs, self._params.logprobs),
            )
        if delta.prompt_logprobs:
            fields["input_logprobs"] = pb.InputLogProbs(
                token_ids=self._prompt_token_ids,
                token_logprobs=[
                    pb.InputTokenLogProb(value=None if entry is None else next(iter(entry.values())).logprob)
                    for entry in delta.prompt_logprobs
                ],
                top_logprobs=_tops(delta.prompt_logprobs, self._params.prompt_logprobs),
            )
        return fields


def _tops(entries: Iterable[TokenLogprobMap | None], count: int | None) -> list[pb.TopLogProbs]:
    """The `count` most likely tokens of each position, the likeliest first; none at all when none are asked for."""
    if not count:
        return []
    tops = []
    for entry in entries:
        best = sorted((p.rank, i, p.logprob) for i, p in (entry or {}).items() if p.rank <= count)
        tops.append(pb.TopLogProbs(token_ids=[i for _, i, _ in best], values=[value for _, _, value in best]))
    return tops
