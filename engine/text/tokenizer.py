"""TextTokenizer: text to ids and back, with the rules about special tokens in one place.

Wraps a `tokenizers.Tokenizer` and is immutable after construction (but for what it remembers), so that
one instance serves every request and thread. Read next: `engine/text/detokenizer.py` (incremental text),
`engine/text/chat.py` (what `encode_rendered` receives).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from engine.errors import InvalidRequest

_MAX_ID = (1 << 32) - 1
CUT = "\ufffd"
"""What decoders give for bytes that are no character, such as half of one."""


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in which byte-level BPE spells its tokens: GPT-2's `bytes_to_unicode`."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


class TextTokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        bos_id: the id that the tokenizer's post-processor puts before a text, None if it puts none.
        special_ids: ids left out of the text under `skip_special_tokens`.
        special_texts: those ids' texts.
        byte_ids: ids of a byte each that are made text in runs (`ByteFallback`); empty where there are none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes over `tokenizer`: truncation and padding saved in its file are switched off."""
        # Saved by training scripts; they would silently cut a long prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        falls_back = "ByteFallback" in repr(tokenizer.decoder)
        bytes_of = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256 if falls_back else 0))
        self.byte_ids = frozenset(i for i in bytes_of if i is not None)
        self.special_texts = frozenset(added[i].content for i in self.special_ids)
        probe = tokenizer.encode("a")
        self.bos_id: int | None = probe.ids[0] if probe.special_tokens_mask[:1] == [1] else None
        self._bos_text = "" if self.bos_id is None else (tokenizer.id_to_token(self.bos_id) or "")
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_len = len(self.decode(self._anchor))
        self._pieces = {skip: _Pieces(self, skip) for skip in (False, True)}
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's padded vocabulary may be larger."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, or more: bytes that are none are spelled out."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def to_json(self) -> str:
        """The text of its tokenizer.json, which other libraries read."""
        return self._tokenizer.to_str()

    def encode(self, text: str, add_special_tokens: bool = True, *, field: str = "prompt") -> list[int]:
        """Ids of a raw prompt, or of what the caller calls `field`.

        With `add_special_tokens` the post-processor's tokens (usually BOS) are added even if the
        text begins with the BOS text already, as transformers and vLLM do. Raises InvalidRequest.
        """
        if not isinstance(text, str):
            raise InvalidRequest(field, f"expected str, found {type(text).__name__}")
        try:
            # Only its batch calls give up the GIL: a text of 400 KB otherwise holds up every thread for 0.5 s.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeError) as e:
            raise InvalidRequest(field, "holds a lone surrogate") from e

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered chat template: exactly one BOS where the model has one.

        The post-processor's BOS is added unless the text begins with its text; nothing else is
        added, in particular no EOS. Raises InvalidRequest.
        """
        ids = self.encode(text, add_special_tokens=False, field="messages")
        if self.bos_id is None or text.startswith(self._bos_text):
            return ids
        return [self.bos_id, *ids]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """One-shot decode; ids that the tokenizer doesn't know are "". Raises InvalidRequest."""
        for i in token_ids:
            if not 0 <= i <= _MAX_ID:
                raise InvalidRequest("token_ids", f"{i} is not a token id")
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens)[0]

    def decode_window(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """`decode` for ids known to be valid, without the check."""
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether `decode` looks at this id at all."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return self._tokenizer.id_to_token(token_id) is not None

    def pieces(self, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """The text of an id behind whole characters, None where it takes neighbours to tell."""
        return self._pieces[skip_special_tokens]

    @property
    def joins_bytes(self) -> bool:
        """Whether a text's bytes are its tokens' bytes joined (byte-level BPE), so that decoding needs no context."""
        return isinstance(self._tokenizer.decoder, ByteLevel)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled so, None if there is none."""
        return self._tokenizer.token_to_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, which may be a part of a character; an unknown id has none.

        Those of a text's tokens concatenate to the text's, but for a space that a decoder strips at its start.
        """
        made = self._bytes.get(token_id)
        if made is None:
            made = self._bytes[token_id] = self._spelled_bytes(token_id)
        return made

    def _spelled_bytes(self, token_id: int) -> bytes:
        spelling = self._tokenizer.id_to_token(token_id) or ""
        if token_id in self.byte_ids:
            return bytes.fromhex(spelling[3:5])
        if self.joins_bytes and token_id not in self._added_ids:
            return bytes(_BYTE_OF[char] for char in spelling if char in _BYTE_OF)
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a sentence: its leading space kept, special tokens spelled out.

        A part of a character is U+FFFD, an unknown id is "". Remembered: alternatives of 512 prompt tokens ask for
        10,000 texts in a step, which take 2.5 us each to make.
        """
        text = self._texts.get(token_id)
        if text is None:
            text = self.decode([*self._anchor, token_id], skip_special_tokens=False)[self._anchor_len :]
            self._texts[token_id] = text
        return text


def need_tokenizer(tokenizer: TextTokenizer | None, field: str) -> TextTokenizer:
    """The tokenizer, without which `field` means nothing. Raises InvalidRequest when the model has none."""
    if tokenizer is None:
        raise InvalidRequest(field, "the model has no tokenizer; only token ids can be used")
    return tokenizer


class _Pieces(dict[int, str | None]):
    """Made as they are asked for: at most one for each id of the vocabulary, 0.1 KB each."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text = self._tokenizer.decode_window([token_id], self._skip_special_tokens)
        piece = text if self._tokenizer.joins_bytes and CUT not in text else None
        self[token_id] = piece
        return piece
