"""The smallest model that a router can serve: golden weights, a tokenizer of ASCII and a chat template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.conftest import GOLDEN

WEIGHTS = GOLDEN / "llama-bias"
LONGEST = 8192
SPECIAL = ["<|pad|>", "<|start|>", "<|end|>"]  # 0, 1, 2 as config.json has them
SPACE, NEWLINE = "\u0120", "\u010a"  # in the byte-level alphabet
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
GENERATION = {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.0}


def make_checkpoint(folder: Path) -> Path:
    """Of 8192 tokens at most; its default is greedy, so that an unset temperature can be told from 1."""
    (folder / "model.safetensors").symlink_to(WEIGHTS / "model.safetensors")
    config = json.loads((WEIGHTS / "config.json").read_text()) | {"max_position_embeddings": LONGEST}
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", GENERATION)
    _write(folder / "tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": "<|end|>"})
    _tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer(vocab_size: int) -> Tokenizer:
    """A token for each printable character; the other ids are words that only the model writes. All of it is ASCII,
    so that whoever decodes it, and however it is cut, gets the same text."""
    pieces = [*SPECIAL, *(chr(c) for c in range(33, 127)), SPACE, NEWLINE]
    pieces += [f"{SPACE}word{i}" for i in range(len(pieces), vocab_size)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))
