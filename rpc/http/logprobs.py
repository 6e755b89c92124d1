"""Log-probabilities in OpenAI's two forms: parallel lists for completions, objects per token for chats."""

from collections.abc import Iterable, Sequence
from typing import Any

from engine.request.outputs import Logprob, TokenLogprobMap


class CompletionLogprobs:
    """The lists of one choice of a completion, made piece by piece; `text_offset` goes on from piece to piece.

    An offset counts characters of the tokens' own texts, in which a part of a character is U+FFFD.
    """

    def __init__(self) -> None:
        self._offset = 0

    def piece(self, positions: Iterable[TokenLogprobMap]) -> dict[str, list[Any]]:
        """The lists for further positions."""
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for position in positions:
            token = next(iter(position.values()))
            self._add(lists, token.decoded_token or "", token.logprob, _by_text(position.values()))
        return lists

    def prompt(self, first: str, positions: Sequence[TokenLogprobMap | None]) -> dict[str, list[Any]]:
        """The lists for an echoed prompt, nothing being known of its first token but its text."""
        lists = self.piece(())
        self._add(lists, first, None, None)
        rest = self.piece(position for position in positions if position is not None)
        return joined(lists, rest)

    def _add(self, lists: dict[str, list[Any]], text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        for name, value in (
            ("text_offset", self._offset),
            ("token_logprobs", logprob),
            ("tokens", text),
            ("top_logprobs", top),
        ):
            lists[name].append(value)
        self._offset += len(text)


def joined(*pieces: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Pieces of one choice as one."""
    return {name: [item for piece in pieces for item in piece[name]] for name in pieces[0]}


def _by_text(tokens: Iterable[Logprob]) -> dict[str, float]:
    """By text, as OpenAI has it; of tokens with the same text the likeliest."""
    top: dict[str, float] = {}
    for token in tokens:
        text = token.decoded_token or ""
        top[text] = max(token.logprob, top.get(text, token.logprob))
    return top


def chat_logprobs(positions: Iterable[TokenLogprobMap], num_top: int) -> list[dict[str, Any]]:
    """One object per position, each with its `num_top` likeliest tokens."""
    return [_chat_position(list(position.values()), num_top) for position in positions]


def _chat_position(tokens: list[Logprob], num_top: int) -> dict[str, Any]:
    top = sorted(tokens, key=lambda token: token.rank)[:num_top]
    return {**_chat_token(tokens[0]), "top_logprobs": [_chat_token(token) for token in top]}


def _chat_token(token: Logprob) -> dict[str, Any]:
    text = token.decoded_token or ""
    spelled = None if token.token_bytes is None else list(token.token_bytes)
    return {"token": text, "logprob": token.logprob, "bytes": spelled}
