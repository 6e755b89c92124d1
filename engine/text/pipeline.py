"""TextPipeline: ids of one choice in, text that may be sent out; detokenizer and stop strings combined.

The loop's publish phase calls it once per choice and token. Invariant: what `push` and `finish`
return concatenates to the choice's text; nothing stays held after either has ended it.
"""

from collections.abc import Callable, Sequence

from engine.request.params import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.stop import StopMatcher
from engine.text.tokenizer import TextTokenizer


class TextPipeline:
    """Text of one choice, cut at its stop strings.

    As in vLLM, stop strings are looked for from token `min_tokens + 1` on: one that ends earlier
    is plain text.
    """

    __slots__ = ("_detokenizer", "_matcher", "_num_unchecked")

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        stops = params.stop_strings
        self._matcher = StopMatcher(stops, params.include_stop_str_in_output) if stops else None
        self._num_unchecked = params.min_tokens

    @property
    def push_plain(self) -> Callable[[int], str] | None:
        """What gives the text of the next id, where there are no stop strings to look for."""
        return self._detokenizer.push_one if self._matcher is None else None

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Take the next id; return the text to send and the stop string that ends the output, if any."""
        text = self._detokenizer.push_one(token_id)
        if self._matcher is None:
            return text, None
        if self._num_unchecked > 0:
            self._num_unchecked -= 1
            return self._matcher.push(text, armed=False)
        return self._matcher.push(text)

    def finish(self) -> str:
        """Held text, when the output ends for another reason than a stop string."""
        held = "" if self._matcher is None else self._matcher.flush()
        return held + self._detokenizer.finish()
