"""A checkpoint folder opened: config, generation defaults, chat template and tokenizer; no weights, no network.

Rules that callers rely on:
- Generation ends at any end token that generation_config.json or config.json names (their union).
- `decoder.vocab_size` may exceed the tokenizer's vocabulary (rows padded for the hardware): such an id
  is sampled like any other if the model favours it, and decodes to empty text.
- A folder without tokenizer.json serves token ids in and out.
Read next: `loader/architectures.py` (config.json), `loader/weights.py` (the tensors).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loader.architectures import decoder_config
from loader.decoder import DecoderConfig
from loader.errors import MAX_SHOWN, CheckpointError, shown
from loader.fields import read_json_object
from loader.generation import GenerationConfig, read_generation

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
DEFAULT_TEMPLATE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a folder says about its model.

    Attributes:
        chat_templates: Jinja sources by name; "default", and "tool_use" for requests with tools.
        special_tokens: variables of the template, e.g. {"bos_token": "<s>"}.
    """

    path: Path
    decoder: DecoderConfig
    generation: GenerationConfig
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]

    @property
    def chat_template(self) -> str | None:
        """The one named "default", None when there is none."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def load_tokenizer(self) -> Tokenizer | None:
        """None when the folder has no tokenizer.json. Raises CheckpointError when it is broken."""
        file = self.path / TOKENIZER_FILE
        if not file.exists():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(file, [f"is not a tokenizer: {str(error)[:MAX_SHOWN]}"]) from error
        if tokenizer.post_processor is not None:
            _check_post_processor(file, json.loads(tokenizer.post_processor.__getstate__()))
        return tokenizer


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Read everything but the weights from a folder. Raises CheckpointError."""
    path = Path(path)
    try:
        return _open_folder(path)
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        raise CheckpointError(path, [f"cannot be read: {error.strerror or error}"]) from error


def _open_folder(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(path, ["no such folder; a model is a folder, a GGUF file, or org/name on the hub"])
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
        generation=read_generation(path, config, decoder.vocab_size),
        chat_templates=_chat_templates(path, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
    )


def _check_post_processor(file: Path, processor: Mapping[str, Any]) -> None:
    """A template that names a token it does not define ends tokenizers with a panic, which is no Exception."""
    for each in [processor, *processor.get("processors", ())]:
        pieces = [*(each.get("single") or ()), *(each.get("pair") or ())]
        wanted = {piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece}
        if missing := sorted(wanted - (each.get("special_tokens") or {}).keys()):
            raise CheckpointError(file, [f"post_processor: {shown(missing[0])} is not among its special_tokens"])


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _chat_templates(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: those of files, else tokenizer_config.json's string, "default", or its list of named ones."""
    files = {file.stem: file for file in sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (path / TEMPLATE_FILE).exists():
        files[DEFAULT_TEMPLATE] = path / TEMPLATE_FILE
    named = tokenizer_config.get("chat_template")
    if isinstance(named, list):
        named = {t.get("name"): t.get("template") for t in named if isinstance(t, dict)}
    elif named is not None:
        named = {DEFAULT_TEMPLATE: named}
    if not all(isinstance(text, str) for pair in (named or {}).items() for text in pair):
        raise CheckpointError(path / TOKENIZER_CONFIG_FILE, ["chat_template: expected a string or a named list"])
    return {**(named or {}), **{name: read_text(file) for name, file in files.items()}}


def read_text(file: Path) -> str:
    """A file of text. Raises CheckpointError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(file, [f"cannot be read: {error}"]) from error


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Every `*_token` of tokenizer_config.json, given as a string or as an object with `content`."""
    tokens = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
