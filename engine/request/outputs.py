"""What a caller gets: deltas while a request runs, whole outputs from the offline API, log-probabilities in both."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the raw logits.

    Attributes:
        rank: 1 is the most likely.
        decoded_token: its text, None without a tokenizer.
        token_bytes: its bytes, which may be a part of a character.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: bytes | None = None


TokenLogprobMap = dict[int, Logprob]
"""One position: the token in question first, then the alternatives asked for."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained since the last message; deltas of one choice concatenate.

    Attributes:
        index: the choice.
        text: new text, "" when it is held back or there is no tokenizer.
        token_ids: new ids; an id may come before its text.
        logprobs: one map per new id, when asked for.
        finish_reason: set on the last delta of the choice.
        stop_reason: the stop string or stop id that ended it, None for the model's end id.
        prompt_logprobs: on the first delta when asked for; None at the first position.
        num_cached_tokens: prompt tokens served from the prefix cache, known on the first delta.
        cumulative_logprob: of the choice so far, when logprobs, best_of or beam search asked for them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobMap, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[TokenLogprobMap | None, ...] | None = None
    num_cached_tokens: int = 0
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One finished choice of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobMap] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request, as the offline API returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobMap | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = True
