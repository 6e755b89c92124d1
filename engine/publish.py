"""LiveRequest: turns what settled for a request into deltas on its channel.

Owns the request's text state (detokenizer and stop strings) and the part of its answer that is
not complete yet (prompt logprobs). Read next: `engine/text/pipeline.py`, `engine/stream.py`.
"""

from engine.plan import StepResult, TokenLogprobs
from engine.request import Delta, Logprob, TokenLogprobMap
from engine.scheduler import Settled
from engine.sequence import Sequence
from engine.stream import OutputChannel
from engine.text.pipeline import TextPipeline
from engine.text.tokenizer import TextTokenizer


class LiveRequest:
    """A request between admission and its last delta."""

    def __init__(self, sequence: Sequence, channel: OutputChannel, tokenizer: TextTokenizer | None) -> None:
        self.sequence = sequence
        self.channel = channel
        self._tokenizer = tokenizer
        self._text: TextPipeline | None = None
        params = sequence.params
        if tokenizer is not None and params.detokenize:
            self._text = TextPipeline(tokenizer, sequence.token_ids, params)
        self._wants_prompt_logprobs = params.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobMap | None] = [None] if self._wants_prompt_logprobs else []
        self._is_first = True

    def publish(self, settled: Settled, result: StepResult) -> bool:
        """Push what settled; True if that was the last of the request, which a stop string may decide."""
        sequence = self.sequence
        self._collect_prompt_logprobs(settled, result)
        if settled.token_id is None and settled.finish is None:
            return False
        finish = settled.finish
        text, stop = self._push_text(settled)
        if stop is not None:
            finish = ("stop", stop)
        ids = () if settled.token_id is None else (settled.token_id,)
        logprobs = None
        if sequence.params.logprobs is not None and result.logprobs is not None and ids:
            top = sequence.params.logprobs
            logprobs = (self._map(result.logprobs, settled.sample, ids[0], top),)
        reason, stop_reason = finish or (None, None)
        shows_prompt = self._is_first and self._wants_prompt_logprobs
        self.channel.push(
            Delta(
                index=sequence.index,
                text=text,
                token_ids=ids,
                logprobs=logprobs,
                finish_reason=reason,
                stop_reason=stop_reason,
                prompt_logprobs=tuple(self._prompt_logprobs) if shows_prompt else None,
                num_cached_tokens=sequence.num_cached_tokens,
            )
        )
        self._is_first = False
        return finish is not None

    def abort(self) -> None:
        """Push the last delta of an aborted request, with the text held back."""
        text = self._text.finish() if self._text is not None else ""
        self.channel.push(Delta(self.sequence.index, text, (), finish_reason="abort"))

    def _push_text(self, settled: Settled) -> tuple[str, str | None]:
        """New text, and the stop string that ends it. The id that stopped has no text of its own."""
        if self._text is None:
            return "", None
        reason = settled.finish[0] if settled.finish is not None else None
        hidden = reason == "stop" and not self.sequence.params.include_stop_str_in_output
        text, stop = ("", None) if settled.token_id is None or hidden else self._text.push(settled.token_id)
        if stop is None and reason is not None:
            text += self._text.finish()
        return text, stop

    def _collect_prompt_logprobs(self, settled: Settled, result: StepResult) -> None:
        if not settled.prompt_rows or result.prompt_logprobs is None:
            return
        top = self.sequence.params.prompt_logprobs or 0
        for row in settled.prompt_rows:
            token_id = self.sequence.token_ids[len(self._prompt_logprobs)]
            self._prompt_logprobs.append(self._map(result.prompt_logprobs, row, token_id, top))

    def _map(self, source: TokenLogprobs, row: int, token_id: int, top: int) -> TokenLogprobMap:
        found = {token_id: self._logprob(token_id, float(source.logprobs[row]), int(source.ranks[row]))}
        ids = source.top_ids[row, :top].tolist()
        for rank, (other, value) in enumerate(zip(ids, source.top_logprobs[row, :top].tolist(), strict=True), 1):
            if other not in found:
                found[other] = self._logprob(other, value, rank)
        return found

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = self._tokenizer.token_text(token_id) if self._tokenizer is not None else None
        return Logprob(logprob, rank, text)
