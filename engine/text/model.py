"""What a model's folder and the settings say of text together: tokenizer, chat templates, defaults and ends."""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import EngineConfig, json_object
from engine.errors import ConfigError
from engine.text.chat_renderer import DEFAULT, ChatRenderer
from engine.text.tokenizer import TextTokenizer
from loader.checkpoint import Checkpoint, open_checkpoint, read_text
from loader.errors import shown
from loader.generation import GenerationConfig, read_generation
from loader.hub import model_folder


@dataclass(frozen=True, slots=True)
class TextModel:
    """A checkpoint under the settings.

    Attributes:
        checkpoint: with the generation defaults and end ids that hold, and the templates that are used.
        tokenizer: None when the folder has none.
    """

    checkpoint: Checkpoint
    tokenizer: TextTokenizer | None
    chat: ChatRenderer


def open_model(config: EngineConfig) -> TextModel:
    """Read everything but the weights. Raises CheckpointError and ConfigError."""
    checkpoint = open_checkpoint(model_folder(config.model, config.revision))
    inner = checkpoint.load_tokenizer()
    tokenizer = None if inner is None else TextTokenizer(inner)
    generation = _generation(config, checkpoint)
    end = None if tokenizer is None else tokenizer.token_id(checkpoint.special_tokens.get("eos_token", ""))
    if end is not None and end < checkpoint.decoder.vocab_size:
        generation = generation.ending_at(end)
    templates = checkpoint.chat_templates
    if config.chat_template is not None:
        templates = {DEFAULT: read_text(Path(config.chat_template))}
    chat = ChatRenderer(
        templates,
        checkpoint.special_tokens,
        default_kwargs=json_object("default_chat_template_kwargs", config.default_chat_template_kwargs),
        escaped=tokenizer.special_texts if tokenizer is not None and config.escape_special_tokens else (),
    )
    return TextModel(replace(checkpoint, generation=generation, chat_templates=templates), tokenizer, chat)


def _generation(config: EngineConfig, checkpoint: Checkpoint) -> GenerationConfig:
    generation = checkpoint.generation
    if config.generation_config == "vllm":
        generation = generation.without_defaults()
    elif config.generation_config != "auto":
        folder = Path(config.generation_config)
        if not folder.is_dir():
            raise ConfigError(
                f"generation_config: {shown(config.generation_config)} is neither auto, vllm nor a folder"
            )
        generation = read_generation(folder, {}, checkpoint.decoder.vocab_size)
        for end in checkpoint.generation.eos_token_ids:
            generation = generation.ending_at(end)
    try:
        override = json_object("override_generation_config", config.override_generation_config)
        return generation.overridden(override)
    except ValueError as error:
        raise ConfigError(f"override_generation_config: {error}") from None
