"""BeamRequest: beam search over the choices of a request, which share their common blocks.

Every beam is a sequence. A step gives each beam its most likely next tokens; when all beams have them,
the best continuations are chosen and the sequences are *branched*: each takes over the blocks and tokens
of the beam it continues, and copies on write as any fork does. Hypotheses that end (at an end id) leave
the beam; the search ends at max_tokens, or when the best live beam, scored at the length it has, does not
beat the worst of the best ended ones. The rules are in docs/sampling.md.
Source: the beam search of Hugging Face transformers (scores are cumulative logprob / length**penalty).
Read next: `engine/serving/live_request.py`, `branch` in `engine/schedule/settle.py`.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from engine.plan import StepResult
from engine.request.outputs import Delta, FinishReason
from engine.schedule.roster import Roster
from engine.schedule.sequence import Sequence
from engine.schedule.settle import Branch, Settled, branch
from engine.serving.live_request import LiveRequest
from engine.serving.stream import OutputChannel
from engine.text.tokenizer import TextTokenizer


class _Candidate(NamedTuple):
    """A continuation of a beam: its cumulative logprob, the beam and the next token."""

    logprob: float
    beam: int
    token_id: int


class _Hypothesis(NamedTuple):
    """An ended output."""

    score: float
    logprob: float
    token_ids: list[int]
    reason: FinishReason


class BeamRequest(LiveRequest):
    """Holds its output back until the search has ended, then pushes the best n."""

    def __init__(self, sequences: Seq[Sequence], channel: OutputChannel, tokenizer: TextTokenizer | None) -> None:
        super().__init__(sequences, channel, tokenizer)
        self._logprobs = [0.0] * len(sequences)
        self._candidates: dict[int, list[_Candidate]] = {}
        self._hypotheses: list[_Hypothesis] = []
        self._has_begun = False

    def publish(self, settled: Settled, result: StepResult, roster: Roster) -> None:
        """Take in a beam's candidates; with those of all beams, move on."""
        self._collect_prompt_logprobs(settled, result)
        if settled.token_id is None or result.logprobs is None:
            return
        beam, width = settled.sequence.index, len(self.sequences)
        ids = result.logprobs.top_ids[settled.sample, : 2 * width].tolist()
        values = result.logprobs.top_logprobs[settled.sample, : 2 * width].tolist()
        self._candidates[beam] = [
            _Candidate(self._logprobs[beam] + value, beam, token_id)
            for token_id, value in zip(ids, values, strict=True)
        ]
        if len(self._candidates) == width:
            self._move_on(roster)

    def _move_on(self, roster: Roster) -> None:
        # The beams begin as equal forks of the prompt: the first one's candidates stand for all.
        begun = self._candidates if self._has_begun else {0: self._candidates[0]}
        self._has_begun = True
        candidates = sorted((c for beam in sorted(begun) for c in begun[beam]), key=lambda c: c.logprob, reverse=True)
        self._candidates = {}
        live = self._choose(candidates)
        num_output = self.sequences[0].num_output + 1
        if num_output >= self.sequences[0].max_output:
            for c in live:
                self._end(c, [*self._output(c.beam), c.token_id], "length")
            live = []
        if len(live) < len(self.sequences) or self._is_decided(live, num_output):
            self._push_best()
            return
        branch(
            roster,
            [
                Branch(target, self.sequences[c.beam], [*self.sequences[c.beam].token_ids, c.token_id])
                for target, c in zip(self.sequences, live, strict=True)
            ],
        )
        self._logprobs = [c.logprob for c in live]

    def _choose(self, candidates: Seq[_Candidate]) -> list[_Candidate]:
        """The continuations that live on; better ones that end become hypotheses on the way."""
        live: list[_Candidate] = []
        for c in candidates:
            if len(live) == len(self.sequences):
                break
            if c.token_id in self.sequences[0].stopping_ids:
                self._end(c, [*self._output(c.beam), c.token_id], "stop")
            else:
                live.append(c)
        return live

    def _end(self, candidate: _Candidate, token_ids: list[int], reason: FinishReason) -> None:
        score = self._score(candidate.logprob, len(token_ids))
        self._hypotheses.append(_Hypothesis(score, candidate.logprob, token_ids, reason))

    def _is_decided(self, live: Seq[_Candidate], num_output: int) -> bool:
        width = len(self.sequences)
        if len(self._hypotheses) < width:
            return False
        worst = sorted((h.score for h in self._hypotheses), reverse=True)[width - 1]
        return self._params.early_stopping or self._score(live[0].logprob, num_output) <= worst

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length**self._params.length_penalty)

    def _output(self, beam: int) -> list[int]:
        sequence = self.sequences[beam]
        return sequence.token_ids[sequence.prompt_len :]

    def _push_best(self) -> None:
        best = sorted(self._hypotheses, key=lambda h: h.score, reverse=True)[: self._params.n]
        for index, hypothesis in enumerate(best):
            shown = hypothesis.token_ids
            if hypothesis.reason == "stop" and not self._params.include_stop_str_in_output:
                shown = shown[:-1]
            text = ""
            if self._tokenizer is not None and self._params.detokenize:
                text = self._tokenizer.decode(shown, self._params.skip_special_tokens)
            self.channel.push(
                Delta(
                    index=index,
                    text=text,
                    token_ids=tuple(hypothesis.token_ids),
                    finish_reason=hypothesis.reason,
                    prompt_logprobs=self._take_prompt_logprobs() if index == 0 else None,
                    num_cached_tokens=self.sequences[0].num_cached_tokens,
                    cumulative_logprob=hypothesis.logprob,
                )
            )
        for choice in self._choices:
            choice.ended = True
