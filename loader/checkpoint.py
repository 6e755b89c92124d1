"""A checkpoint folder opened: config, generation defaults, chat template and tokenizer; no weights, no network.

Rules that callers rely on:
- Generation ends at any end token that generation_config.json or config.json names (their union).
- `decoder.vocab_size` may exceed the tokenizer's vocabulary (rows padded for the hardware): such an id
  is sampled like any other if the model favours it, and decodes to empty text.
- A folder without tokenizer.json serves token ids in and out.
Read next: `loader/architectures.py` (config.json), `loader/weights.py` (the tensors).
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loader.architectures import decoder_config
from loader.decoder import DecoderConfig
from loader.errors import CheckpointError
from loader.fields import Fields, read_json_object

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Defaults of generation; None where the checkpoint says nothing.

    Attributes:
        eos_token_ids: ids that end a generation, each once; may be empty.
    """

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a folder says about its model.

    Attributes:
        chat_template: Jinja source, None when there is none.
        special_tokens: variables of the template, e.g. {"bos_token": "<s>"}.
    """

    path: Path
    decoder: DecoderConfig
    generation: GenerationConfig
    chat_template: str | None
    special_tokens: Mapping[str, str]

    def load_tokenizer(self) -> Tokenizer | None:
        """None when the folder has no tokenizer.json. Raises CheckpointError when it is broken."""
        file = self.path / TOKENIZER_FILE
        if not file.exists():
            return None
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(file, [f"is not a tokenizer: {error}"]) from error


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Read everything but the weights from a folder. Raises CheckpointError."""
    path = Path(path)
    try:
        return _open_folder(path)
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        raise CheckpointError(path, [f"cannot be read: {error.strerror or error}"]) from error


def _open_folder(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(path, ["no such folder; a model is a folder on this machine, nothing is downloaded"])
    if not path.is_dir():
        raise CheckpointError(path, ["is a file, expected a checkpoint folder (`engine import` makes one of a GGUF)"])
    if not (path / CONFIG_FILE).exists():
        raise CheckpointError(path, [f"has no {CONFIG_FILE}"])
    config = read_json_object(path / CONFIG_FILE)
    decoder = decoder_config(config, path / CONFIG_FILE)
    tokenizer_config = _read_optional(path / TOKENIZER_CONFIG_FILE)
    return Checkpoint(
        path=path,
        decoder=decoder,
        generation=_generation_config(path, config, decoder.vocab_size),
        chat_template=_chat_template(path, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _generation_config(path: Path, config: Mapping[str, Any], vocab_size: int) -> GenerationConfig:
    file = path / GENERATION_FILE
    generation = _read_optional(file)
    problems: list[str] = []
    ids = [
        token
        for name, source in ((GENERATION_FILE, generation), (CONFIG_FILE, config))
        for token in _token_ids(name, source.get("eos_token_id"), vocab_size, problems)
    ]
    bos = generation.get("bos_token_id", config.get("bos_token_id"))
    fields = Fields(generation, problems, prefix=f"{GENERATION_FILE}: ")
    result = GenerationConfig(
        eos_token_ids=tuple(dict.fromkeys(ids)),
        bos_token_id=bos if type(bos) is int and 0 <= bos < vocab_size else None,
        temperature=_optional_number(fields, "temperature", maximum=sys.float_info.max),
        top_p=_optional_number(fields, "top_p", maximum=1.0) or None,  # some folders have 0 for "not given"
        top_k=_optional_count(fields, "top_k"),
    )
    if problems:
        raise CheckpointError(path, problems)
    return result


def _token_ids(file: str, value: Any, vocab_size: int, problems: list[str]) -> list[int]:
    """The valid ones of an id, a list of ids or null; the others go to `problems`."""
    ids = []
    for token in [] if value is None else value if isinstance(value, list) else [value]:
        if type(token) is int and 0 <= token < vocab_size:
            ids.append(token)
        else:
            problems.append(f"{file}: eos_token_id: {token!r} is not a token id below {vocab_size}")
    return ids


def _optional_number(fields: Fields, name: str, maximum: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0.0 <= value <= maximum:
        fields.problem(name, f"{value!r} is not a number from 0 to {maximum:g}")
        return None
    return float(value)


def _optional_count(fields: Fields, name: str) -> int | None:
    value = fields.get(name)
    if value is None or (type(value) is int and value >= 0):
        return value
    fields.problem(name, f"{value!r} is not a count")
    return None


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's string, or the one named "default" of its list."""
    file = path / TEMPLATE_FILE
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(file, [f"cannot be read: {error}"]) from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(path / TOKENIZER_CONFIG_FILE, ["chat_template: expected a string or a named list"])
    return template


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Every `*_token` of tokenizer_config.json, given as a string or as an object with `content`."""
    tokens = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
