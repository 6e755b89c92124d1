"""Small tokenizers of the three kinds that matter for incremental text, and texts that hurt."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from engine.text.tokenizer import TextTokenizer

CORPUS = [
    "Hello world! The quick brown fox jumps over the lazy dog. Streaming text, one token at a time.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy; čeština, řeka, šťáva.",
    "你好,世界。今天天气很好。",
]
TEXTS = [
    "Hello world!",
    "thumbs 👍🏽 up 👩‍👩‍👧 family",
    "今天天气很好,你好世界 汉字龘",
    "Příliš žluťoučký kůň: čřšžťďň",
    " leading space,  two spaces,\n\n newlines\tand tabs ",
    "a literal \ufffd mark",
    "e\u0301 combining, \u200b zero width, \U0010ffff last",
]


@cache
def byte_level() -> TextTokenizer:
    """As GPT-2, Llama 3, SmolLM2: ids are pieces of the UTF-8 bytes. No BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return TextTokenizer(tokenizer)


@cache
def metaspace() -> TextTokenizer:
    """As T5 and other SentencePiece conversions: Metaspace decoder, BOS added by the post-processor."""
    return _sentencepiece(decoders.Metaspace())


@cache
def byte_fallback() -> TextTokenizer:
    """As Llama 1 and 2: rare characters become byte tokens; the text's first space is stripped."""
    return _sentencepiece(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


def _sentencepiece(decoder: decoders.Decoder) -> TextTokenizer:
    words = ["▁", "▁Hello", "▁world", "▁text", "▁two", "!", ",", ".", "▁a", "你好", "世界"]
    letters = sorted({c for text in (*CORPUS, "<>|/") for c in text if c.isascii() and not c.isspace()} - set("!,."))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = [(p, 0.0) for p in pieces] + [(w, -1.0) for w in words] + [(c, -5.0) for c in letters]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return TextTokenizer(tokenizer)


KINDS = {"byte_level": byte_level, "metaspace": metaspace, "byte_fallback": byte_fallback}
