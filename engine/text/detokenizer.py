"""Detokenizer: the text of one choice, token by token.

Rule: the deltas concatenate to what `decode(prompt + output)` has after `decode(prompt)`, so the
first token keeps its leading space (Metaspace decoders drop it at the start of a text). A
character cut at the end of the prompt and completed by the output belongs to the output.

Every push decodes a window: a few ids whose text is out already (the context, because decoders
look at neighbours) and the ids after them. The window ends up whole when its text does not end in
U+FFFD; it then moves on. So the cost of a token depends on neither prompt nor output length.

Byte-level BPE needs no context: behind whole characters the window is empty, and an id whose bytes are
whole characters has a text of its own, which is looked up (0.1 us, a window takes 5).

Not built on `tokenizers.decoders.DecodeStream` (0.23.3), which raises on a byte-fallback run that
turns invalid, sends the prompt's tail when the prompt ends inside a character, is quadratic while
bytes stay invalid (4,000 ids: 1.2 s), and can't tell what it holds when the output ends.

Exception to the rule: a ByteFallback decoder turns a whole run of byte tokens into U+FFFD when the
run is not valid UTF-8, including characters of it that were valid when they were sent. Those stay, as in vLLM;
`decode` has them, too.
"""

from collections.abc import Sequence

from engine.text.tokenizer import CUT, TextTokenizer

_MAX_CUT_IDS = 3
"""A character has at most 4 bytes and a token at least one: at most 3 ids (and 3 U+FFFD) are a cut character."""
_MAX_INVALID_IDS = 16
_KEPT_IDS = 12
"""Of a longer run without a whole character, the last ids stay: 3 U+FFFD of at most 3 bytes each are 9."""
_MAX_CONTEXT_IDS = 256


def decode(tokenizer: TextTokenizer, token_ids: Sequence[int]) -> str:
    """The text of a whole output, as its deltas concatenate to. Raises InvalidRequest for what is no id."""
    text = tokenizer.decode(token_ids)
    if CUT not in text or not tokenizer.byte_ids:
        return text
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=True)
    return detokenizer.push(token_ids) + detokenizer.finish()


class Detokenizer:
    """Incremental text of one output. Ids that the tokenizer doesn't know have no text."""

    __slots__ = ("_ids", "_num_context", "_num_cut", "_pieces", "_sent", "_skip_special_tokens", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._ids = self._context(prompt_token_ids)
        # What of the window's text is not to be sent any more; at first, all of the prompt's.
        self._sent = tokenizer.decode_window(self._ids, skip_special_tokens)
        # Ids to drop when the window moves: it must not begin inside a character.
        self._num_context = 0 if self._sent.endswith(CUT) else len(self._ids)
        self._num_cut = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these ids made final; "" while a character is incomplete."""
        return "".join([self.push_one(i) for i in token_ids])

    def push_one(self, token_id: int) -> str:
        """`push` of one id."""
        if not self._ids and (piece := self._pieces[token_id]) is not None:
            return piece
        return self._push_window(token_id)

    def finish(self) -> str:
        """The rest: a character that stayed incomplete, as U+FFFD."""
        text = self._tokenizer.decode_window(self._ids, self._skip_special_tokens)
        delta = text[self._num_sent(text) :]
        self._sent = text
        return delta

    def _push_window(self, token_id: int) -> str:
        tokenizer, skip = self._tokenizer, self._skip_special_tokens
        if not tokenizer.is_visible(token_id, skip):
            return ""
        self._ids.append(token_id)
        text = tokenizer.decode_window(self._ids, skip)
        if text.endswith(CUT):
            return self._push_cut(text)
        delta = text[self._num_sent(text) :]
        del self._ids[: None if tokenizer.joins_bytes else self._num_context]
        self._num_context = len(self._ids)
        self._num_cut = 0
        self._sent = tokenizer.decode_window(self._ids, skip)
        return delta

    def _push_cut(self, text: str) -> str:
        """The window's text ends in U+FFFD: send what lies before the character that may be cut."""
        self._num_cut += 1
        num_held = len(text) - len(text.rstrip(CUT))
        if self._num_cut > _MAX_CUT_IDS:
            num_held = min(num_held, _MAX_CUT_IDS)
        final = text[: len(text) - num_held]
        delta = final[self._num_sent(text) :]
        if delta:
            self._sent = final
        if self._num_cut > _MAX_INVALID_IDS:
            num_unsent = len(text) - self._num_sent(text)
            del self._ids[:-_KEPT_IDS]
            self._num_context = 0
            text = self._tokenizer.decode_window(self._ids, self._skip_special_tokens)
            self._sent = text[: len(text) - num_unsent]
        return delta

    def _num_sent(self, text: str) -> int:
        """How much of the window's text is out. What was U+FFFD may have become a character since."""
        sent = self._sent
        if text.startswith(sent):
            return len(sent)
        num_sent = len(sent.rstrip(CUT))
        while num_sent < len(sent) and text.startswith(CUT, num_sent):
            num_sent += 1
        return num_sent

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last visible ids, from one that is no part of a character on."""
        tokenizer, skip = self._tokenizer, self._skip_special_tokens
        context: list[int] = []
        for i in reversed(prompt_token_ids):
            if not tokenizer.is_visible(i, skip):
                continue
            if self._pieces[i] is not None and not context:
                break
            context.append(i)
            if CUT not in tokenizer.decode_window([i], skip) or len(context) == _MAX_CONTEXT_IDS:
                break
        context.reverse()
        return context
