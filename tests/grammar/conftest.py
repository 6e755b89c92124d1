"""The demo model's tokenizer and a compiler of grammars for it."""

from pathlib import Path

import pytest

from engine.grammar.grammar import GrammarCompiler
from engine.text.tokenizer import TextTokenizer
from loader.checkpoint import open_checkpoint

EOS = 2
VOCAB = 49152


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> TextTokenizer:
    inner = open_checkpoint(smollm2).load_tokenizer()
    assert inner is not None and inner.get_vocab_size() == VOCAB
    return TextTokenizer(inner)


@pytest.fixture(scope="module")
def compiler(tokenizer: TextTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, [EOS])
