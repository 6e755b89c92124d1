"""The text path of the demo model, whose tokenizer and template come from its GGUF."""

from pathlib import Path

import numpy as np
import pytest

from engine.text.chat import ChatTemplate
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import TextTokenizer
from loader.checkpoint import Checkpoint, open_checkpoint
from tests.conftest import GOLDEN
from tests.text.samples import TEXTS
from tests.text.test_templates import FOLDER


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path) -> Checkpoint:
    return open_checkpoint(smollm2)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> TextTokenizer:
    inner = checkpoint.load_tokenizer()
    assert inner is not None
    return TextTokenizer(inner)


def test_chat_prompt(checkpoint: Checkpoint, tokenizer: TextTokenizer) -> None:
    assert checkpoint.chat_template == (FOLDER / "smollm2.jinja").read_text(encoding="utf-8")
    text = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens).render([{"role": "user", "content": "Hi"}])
    ids = tokenizer.encode_rendered(text)
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 2, 1, 2, 1]  # <|im_start|>, <|im_end|>
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_streamed_text_equals_the_text(checkpoint: Checkpoint, tokenizer: TextTokenizer) -> None:
    prompt = tokenizer.encode("<|im_start|>assistant\n")
    for text in TEXTS:
        detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
        deltas = [detokenizer.push([i]) for i in tokenizer.encode(text)]
        assert "".join(deltas) + detokenizer.finish() == text
        assert "\ufffd" in text or not any("\ufffd" in d for d in deltas)


def test_golden_prompts(tokenizer: TextTokenizer) -> None:
    with np.load(GOLDEN / "smollm2-135m-instruct" / "golden.npz") as golden:
        for k in range(5):
            assert tokenizer.encode(str(golden[f"text_{k}"])) == golden[f"prompt_{k}"].tolist()
