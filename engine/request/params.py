"""SamplingParams: what a caller asks for, under vLLM's field names and defaults.

Everything a bad value could break is refused here, by field name, before anything is queued. What only one engine
knows (its vocabulary, its limits) is checked in `engine/serving/factory.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from engine.errors import InvalidRequest
from engine.request.structured import StructuredOutputs, check_utf8
from loader.errors import shown

MAX_SEED = (1 << 63) - 1
MAX_TOP_K = (1 << 31) - 1
MAX_LENGTH_PENALTY = 16.0
"""Twice as much and length**penalty leaves float64 at 2**32 tokens."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
"""Logits stay finite in float32 by far."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 128
"""They are tokenized on the loop: 256 of so many take it 40 ms at most."""
MAX_TEMPERATURE = 1e38
"""Logits over it are divided in float32."""

_NOT_WITH_BEAMS = {
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("top_p", "top_k", "min_p", "min_tokens", "stop", "logprobs", "structured_outputs"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick tokens and when to stop. Raises InvalidRequest naming the field.

    Attributes:
        n: choices to return.
        best_of: choices to sample, of which the `n` with the highest cumulative logprob are returned.
        use_beam_search: return the `n` best of `best_of` (or `n`) beams, ranked by raw logprobs.
        length_penalty: -16 .. 16; a beam's score is its cumulative logprob / length**length_penalty.
        early_stopping: end the search as soon as there are as many ended outputs as beams.
        presence_penalty: -2 .. 2, subtracted from the logits of ids in the output.
        frequency_penalty: -2 .. 2, subtracted once for each time an id is in the output.
        repetition_penalty: 0.001 .. 1000; above 1 makes ids of prompt and output less likely.
        temperature: 0 .. 1e38; 0 is greedy.
        top_p: keep the smallest set of tokens whose mass reaches it; 1 is off.
        top_k: keep the k most likely; 0 and -1 are off, above the vocabulary is off.
        min_p: keep tokens at least this share as likely as the most likely; 0 is off.
        seed: 0 .. 2**63-1; None draws one.
        stop: strings that end the output; the output ends just before one.
        stop_token_ids: ids that end the output, also under `ignore_eos`.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: the model's own end ids do not stop.
        max_tokens: most tokens to produce; None is as many as fit; 0 computes the prompt only.
        min_tokens: no end id is sampled before this many tokens.
        logprobs: report the sampled token's log-probability and this many alternatives.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: produce text at all; without a tokenizer there is none anyway.
        logit_bias: id to a value in -100 .. 100 added to its logit.
        allowed_token_ids: the only ids that may be sampled.
        bad_words: texts whose token sequences may not be completed.
        truncate_prompt_tokens: keep only so many of the prompt's last tokens.
        structured_outputs: what the output's text must match.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", tuple(dict.fromkeys(stop)))
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids or ())))
        self._check_numbers()
        self._check_stops()
        self._check_token_rules()
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise InvalidRequest("structured_outputs", "must be a StructuredOutputs")
        if self.use_beam_search:
            self._check_beam_search()

    def _check_numbers(self) -> None:
        _check_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("n", self.n, 1, None)
        _check_int("best_of", self.best_of, self.n, None)
        _check_int("top_k", self.top_k, -1, MAX_TOP_K)
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_int("max_tokens", self.max_tokens, 0, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        _check_int("logprobs", self.logprobs, 0, None)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, None)
        if self.num_choices > 1 and self.max_tokens == 0:
            raise InvalidRequest("n", "must be 1 when max_tokens is 0: there is nothing to choose")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")

    def _check_stops(self) -> None:
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"{len(self.stop_strings)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for s in self.stop_strings:
            _check_text("stop", s, MAX_STOP_CHARS)
        if len(self.stop_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                "stop_token_ids", f"{len(self.stop_ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        for i in self.stop_ids:
            _check_int("stop_token_ids", i, 0, None)

    def _check_token_rules(self) -> None:
        if self.stop_strings and not self.detokenize:
            raise InvalidRequest("stop", "needs detokenize: there is no text to stop at without it")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias", token_id, 0, None)
            _check_float("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "is empty, so that nothing could be sampled")
        for token_id in self.allowed_token_ids or ():
            _check_int("allowed_token_ids", token_id, 0, None)
        if len(self.bad_words or ()) > MAX_BAD_WORDS:
            raise InvalidRequest("bad_words", f"{len(self.bad_words or ())} words, at most {MAX_BAD_WORDS} are allowed")
        for word in self.bad_words or ():
            _check_text("bad_words", word, MAX_BAD_WORD_CHARS)
        _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, None)

    def _check_beam_search(self) -> None:
        """Beams are ranked by raw logprobs, so what bends the logits or samples has no place there."""
        for f in fields(self):
            if f.name in _NOT_WITH_BEAMS and getattr(self, f.name) not in (f.default, ()):
                raise InvalidRequest(f.name, "cannot be combined with use_beam_search")

    @property
    def num_choices(self) -> int:
        """Choices to sample."""
        return self.best_of or self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, normalised."""
        return self.stop  # type: ignore[return-value]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids`, normalised."""
        return self.stop_token_ids  # type: ignore[return-value]


def _check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    # Compared as it is: an integer may be too large for a float.
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok or (open_low and value == low):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidRequest(name, f"{shown(value)} is out of range, must be in {bounds}")


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if value is None:
        return
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(name, f"{shown(value)} is out of range, must be {limits}")


def _check_text(name: str, value: object, most: int) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= most:
        raise InvalidRequest(name, f"each must be a string of 1 to {most} characters")
    check_utf8(name, value)
