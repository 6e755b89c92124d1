"""The vocabulary of a GGUF file as a Hugging Face tokenizer.

Two models exist in Llama-family files: "gpt2", byte-level BPE with merges, whose way of cutting text into
words is only named (`tokenizer.ggml.pre`), and "llama", SentencePiece BPE, whose merges follow from
the scores. Ids of type "unused" (padding rows) get no token: they decode to empty text.
"""

from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from loader.errors import CheckpointError, shown

Metadata = Mapping[str, Any]


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, numbered as in SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<|endoftext|>"),
    *("<end_of_turn>", "<EOT>", "<|eot|>", "<|return|>", "<|call|>", "</s>"),
}
"""Tokens that end a turn whatever else the file says, as llama.cpp has it: many files name only one of theirs."""
_ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED)

_SPECIAL_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""GGUF's name of a special token -> Hugging Face's."""


def build_tokenizer(source: Path, metadata: Metadata) -> Tokenizer:
    """Raises CheckpointError naming a tokenizer model or pre-tokenizer that is not supported."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    _check_vocabulary(source, metadata, tokens, types)
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(source, metadata, vocab)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, vocab, tokens)
    else:
        raise CheckpointError(
            source, [f"tokenizer.ggml.model: {shown(model)} is not supported, expected gpt2 or llama"]
        )
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    _add_ends(tokenizer, metadata, tokens)
    return tokenizer


def _check_vocabulary(source: Path, metadata: Metadata, tokens: list[str], types: list[int]) -> None:
    problems = [
        f"tokenizer.ggml.tokens: {shown(token)} is listed {n} times" for token, n in Counter(tokens).items() if n > 1
    ]
    scores = metadata.get("tokenizer.ggml.scores", tokens)
    for name, values in (("token_type", types), ("scores", scores)):
        if len(values) != len(tokens):
            problems.append(f"tokenizer.ggml.{name}: has {len(values)} entries for {len(tokens)} tokens")
    if metadata.get("tokenizer.ggml.model") == "llama" and scores is tokens:
        problems.append("tokenizer.ggml.scores: is missing")
    for role in _SPECIAL_ROLES:
        value = metadata.get(f"tokenizer.ggml.{role}_token_id", 0)
        if not 0 <= value < len(tokens):
            problems.append(f"tokenizer.ggml.{role}_token_id: {value} is not among the {len(tokens)} tokens")
    if problems:
        raise CheckpointError(source, problems)


def _byte_level(source: Path, metadata: Metadata, vocab: dict[str, int]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    gpt2_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words: dict[str, list[Any]] = {
        "gpt-2": [gpt2_words],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), gpt2_words],
        "llama-bpe": [
            pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    if pre not in words:
        raise CheckpointError(
            source, [f"tokenizer.ggml.pre: {shown(pre)} is not supported, expected one of {', '.join(words)}"]
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    # Llama 3's vocabulary has words that its merges do not reach
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, vocab: dict[str, int], tokens: list[str]) -> Tokenizer:
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges_by_score(vocab, metadata["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose piece scores highest; as a ranked list that is every split of
    every piece, best piece first."""
    pieces = sorted(vocab, key=lambda piece: -scores[vocab[piece]])
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]


def _add_ends(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str]) -> None:
    """Tokens that go around every encoded text; the defaults are llama.cpp's."""
    byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
    starts = not byte_level or metadata.get("tokenizer.ggml.pre") == "llama-bpe"

    def token(role: str, default: bool) -> list[tuple[str, int]]:
        value = metadata.get(f"tokenizer.ggml.{role}_token_id")
        wanted = metadata.get(f"tokenizer.ggml.add_{role}_token", default)
        return [(tokens[value], value)] if wanted and value is not None else []

    first, last = token("bos", starts), token("eos", False)
    if first or last:
        template = [*(text for text, _ in first), "$A", *(text for text, _ in last)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=first + last)


def special_token_ids(metadata: Metadata) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` where the file has them; every known end of a turn ends."""
    ids: dict[str, Any] = {}
    for role, name in _SPECIAL_ROLES.items():
        value = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if value is not None and name != "unk":
            ids[f"{name}_token_id"] = value
    named = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    known = [i for i, kind in enumerate(types) if kind in _ADDED and tokens[i] in _ENDS]
    ends = list(dict.fromkeys(i for i in (*named, *known) if i is not None))
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by role, and the chat template."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, name in _SPECIAL_ROLES.items():
        value = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if value is not None:
            config[f"{name}_token"] = tokens[value]
    template = metadata.get("tokenizer.chat_template")
    return config | ({} if template is None else {"chat_template": template})
