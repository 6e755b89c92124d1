"""LiveRequest: turns what settled for a request into deltas on its channel.

Owns the request's choices, their text state (detokenizer and stop strings) and the part of the
answer that is not complete yet: prompt logprobs and, under best_of, everything until the choices
can be compared. Read next: `engine/text/pipeline.py`, `engine/serving/stream.py`.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.plan import StepResult, TokenLogprobs
from engine.request.outputs import Delta, Logprob, TokenLogprobMap
from engine.schedule.roster import Roster
from engine.schedule.sequence import Sequence
from engine.schedule.settle import Settled
from engine.serving.stream import OutputChannel
from engine.text.pipeline import TextPipeline
from engine.text.tokenizer import TextTokenizer


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request that is alive; None until they do.

    Attributes:
        arrival: when it was queued.
        scheduled: when its first step was launched; preemption does not change it.
        first_token: when its first token settled, of any choice.
        last_tokens: when the last token of each choice settled.
        num_tokens: tokens sampled for each choice.
        preempted: when it lost its row; kept only if requests are traced.
    """

    num_choices: int
    arrival: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    last_tokens: list[float | None] = field(init=False)
    num_tokens: list[int] = field(init=False)
    preempted: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last_tokens = [None] * self.num_choices
        self.num_tokens = [0] * self.num_choices


@dataclass(slots=True)
class _Choice:
    """One choice: its text state, and under best_of its score and the deltas held back."""

    text: TextPipeline | None
    ended: bool = False
    cumulative_logprob: float = 0.0
    held: list[Delta] = field(default_factory=list)


class LiveRequest:
    """A request between its arrival and its last delta.

    Attributes:
        sequences: its choices; the first one computes the prompt and the others fork from it.
        times: when things happened to it; written by the loop and its observer.
        trace_headers: the trace that its call belongs to, if requests are traced.
    """

    def __init__(self, sequences: Seq[Sequence], channel: OutputChannel, tokenizer: TextTokenizer | None) -> None:
        self.sequences = tuple(sequences)
        self.channel = channel
        self.times = RequestTimes(len(self.sequences))
        self.trace_headers: Mapping[str, str] | None = None
        self._tokenizer = tokenizer
        params = sequences[0].params
        self._params = params
        self._holds_back = len(sequences) > params.n
        self._wants_scores = params.logprobs is not None or self._holds_back
        self._is_bare = not self._wants_scores and params.prompt_logprobs is None
        self._choices = [_Choice(self._make_text(s)) for s in sequences]
        self._prompt_logprobs: list[TokenLogprobMap | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]

    @property
    def request_id(self) -> str:
        """Names the request."""
        return self.sequences[0].request_id

    @property
    def ended(self) -> bool:
        """Every choice has ended."""
        return all(choice.ended for choice in self._choices)

    def publish(self, settled: Settled, result: StepResult, roster: Roster) -> None:
        """Push what settled; take a choice out if a stop string has ended it."""
        choice = self._choices[settled.sequence.index]
        self._collect_prompt_logprobs(settled, result)
        if settled.token_id is None and settled.finish is None:
            return
        text, stop = self._push_text(choice, settled)
        if settled.token_id is not None and result.logprobs is not None:
            choice.cumulative_logprob += float(result.logprobs.logprobs[settled.sample])
        self._push_delta(choice, settled, text, stop, self._sampled_logprobs(settled, result))
        if stop is not None:
            roster.finish(settled.sequence)

    def _push_delta(
        self,
        choice: _Choice,
        settled: Settled,
        text: str,
        stop: str | None,
        logprobs: tuple[TokenLogprobMap, ...] | None,
    ) -> None:
        sequence = settled.sequence
        reason, stop_reason = ("stop", stop) if stop is not None else settled.finish or (None, None)
        delta = Delta(
            index=sequence.index,
            text=text,
            token_ids=() if settled.token_id is None else (settled.token_id,),
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt_logprobs=self._take_prompt_logprobs() if sequence.index == 0 and not self._holds_back else None,
            num_cached_tokens=sequence.num_cached_tokens,
            cumulative_logprob=choice.cumulative_logprob if self._wants_scores else None,
        )
        choice.ended = reason is not None
        if self._holds_back:
            self._hold(choice, delta)
            return
        self.channel.push(delta)
        if self._is_bare and not choice.ended:
            text_of = _no_text if choice.text is None else choice.text.push_plain
            sequence.push_plain = None if text_of is None else self.channel.plain_sink(sequence.index, text_of)

    def abort(self) -> None:
        """Push the last delta of every choice of an aborted request, with the text held back.

        Choices that are still being compared end without output.
        """
        for index, choice in enumerate(self._choices[: self._params.n]):
            if self._holds_back:
                self.channel.push(Delta(index, "", (), finish_reason="abort"))
            elif not choice.ended:
                text = choice.text.finish() if choice.text is not None else ""
                self.channel.push(Delta(index, text, (), finish_reason="abort"))

    def _make_text(self, sequence: Sequence) -> TextPipeline | None:
        if self._tokenizer is None or not sequence.params.detokenize:
            return None
        return TextPipeline(self._tokenizer, sequence.token_ids, sequence.params)

    def _push_text(self, choice: _Choice, settled: Settled) -> tuple[str, str | None]:
        """New text, and the stop string that ends it. The id that stopped has no text of its own."""
        if choice.text is None:
            return "", None
        reason = settled.finish[0] if settled.finish is not None else None
        stops = settled.token_id in settled.sequence.stopping_ids
        hidden = reason == "stop" and stops and not self._params.include_stop_str_in_output
        text, stop = ("", None) if settled.token_id is None or hidden else choice.text.push(settled.token_id)
        if stop is None and reason is not None:
            text += choice.text.finish()
        return text, stop

    def _hold(self, choice: _Choice, delta: Delta) -> None:
        """Keep a delta until every choice has ended; then push the best n, by cumulative logprob."""
        choice.held.append(delta)
        if self.ended:
            best = sorted(self._choices, key=lambda c: c.cumulative_logprob, reverse=True)[: self._params.n]
            best[0].held[0] = replace(best[0].held[0], prompt_logprobs=self._take_prompt_logprobs())
            for index, winner in enumerate(best):
                for kept in winner.held:
                    self.channel.push(replace(kept, index=index))

    # -- logprobs ---------------------------------------------------------------------------

    def _sampled_logprobs(self, settled: Settled, result: StepResult) -> tuple[TokenLogprobMap, ...] | None:
        if self._params.logprobs is None or settled.token_id is None or result.logprobs is None:
            return None
        return (self._map(result.logprobs, settled.sample, settled.token_id, self._params.logprobs),)

    def _collect_prompt_logprobs(self, settled: Settled, result: StepResult) -> None:
        if self._prompt_logprobs is None or result.prompt_logprobs is None:
            return
        for row in settled.prompt_rows:
            token_id = settled.sequence.token_ids[len(self._prompt_logprobs)]
            top = self._params.prompt_logprobs or 0
            self._prompt_logprobs.append(self._map(result.prompt_logprobs, row, token_id, top))

    def _take_prompt_logprobs(self) -> tuple[TokenLogprobMap | None, ...] | None:
        """The prompt's logprobs, once, with the first delta."""
        taken, self._prompt_logprobs = self._prompt_logprobs, None
        return None if taken is None else tuple(taken)

    def _map(self, source: TokenLogprobs, row: int, token_id: int, top: int) -> TokenLogprobMap:
        found = {token_id: self._logprob(token_id, float(source.logprobs[row]), int(source.ranks[row]))}
        ids = source.top_ids[row, :top].tolist()
        for rank, (other, value) in enumerate(zip(ids, source.top_logprobs[row, :top].tolist(), strict=True), 1):
            if other not in found:
                found[other] = self._logprob(other, value, rank)
        return found

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        if self._tokenizer is None:
            return Logprob(logprob, rank)
        return Logprob(logprob, rank, self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id))


def _no_text(token_id: int) -> str:
    return ""
