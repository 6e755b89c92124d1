"""What a folder and the settings say of text together."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.text.model import TextModel, open_model
from loader.generation import GenerationConfig
from tests.engine.test_engine import LLAMA
from tests.loader.files import copy_checkpoint, write_json
from tests.text.samples import byte_level

FOLDERS = {"temperature": 0.5, "top_k": 5, "max_new_tokens": 9, "eos_token_id": 7}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its config.json ends at 2; its tokenizer's end is 0."""
    folder = copy_checkpoint(LLAMA, tmp_path / "model")
    (folder / "tokenizer.json").write_text(byte_level().to_json())
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": "own {{ x }}"})
    write_json(folder / "generation_config.json", FOLDERS)
    return folder


def opened(folder: Path, **settings: Any) -> TextModel:
    return open_model(EngineConfig(model=str(folder), **settings))


def test_the_tokenizers_own_end_ends_too(folder: Path) -> None:
    assert opened(folder).checkpoint.generation.eos_token_ids == (7, 2, 0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"temperature": 0.5, "top_k": 5, "max_new_tokens": 9}),
        ({"generation_config": "vllm"}, {}),
        ({"override_generation_config": '{"top_k": null, "min_p": 0.1}'}, FOLDERS | {"top_k": None, "min_p": 0.1}),
        (
            {"generation_config": "vllm", "override_generation_config": '{"repetition_penalty": 2}'},
            {"repetition_penalty": 2},
        ),
    ],
)
def test_where_defaults_come_from(folder: Path, settings: dict[str, Any], expected: dict[str, Any]) -> None:
    generation = opened(folder, **settings).checkpoint.generation
    wanted = {name: value for name, value in expected.items() if name != "eos_token_id"}
    assert generation == GenerationConfig(eos_token_ids=(7, 2, 0), bos_token_id=generation.bos_token_id, **wanted)


def test_defaults_of_another_folder(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_json(other / "generation_config.json", {"temperature": 0.25, "eos_token_id": 4})
    generation = opened(folder, generation_config=str(other)).checkpoint.generation
    assert generation.temperature == 0.25 and generation.top_k is None
    assert generation.eos_token_ids == (4, 7, 2, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generation_config": "nowhere"}, "generation_config: 'nowhere' is neither auto, vllm nor a folder"),
        ({"override_generation_config": "{"}, "override_generation_config: is not JSON"),
        ({"override_generation_config": "[]"}, "override_generation_config: must be a JSON object"),
        ({"override_generation_config": '{"top_p": 2}'}, "override_generation_config: top_p: 2 is not a number"),
        ({"override_generation_config": '{"best": 2}'}, "override_generation_config: best: is not one of temperature"),
        ({"default_chat_template_kwargs": '{"tools": []}'}, "default_chat_template_kwargs: tools cannot be set here"),
    ],
)
def test_settings_that_cannot_be(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(folder, **settings)


def test_a_template_in_place_of_the_models(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("other {{ x }}")
    messages = [{"role": "user", "content": "?"}]
    kwargs = {"default_chat_template_kwargs": json.dumps({"x": 3})}
    assert opened(folder, **kwargs).chat.render(messages) == "own 3"
    assert opened(folder, **kwargs, chat_template=str(file)).chat.render(messages) == "other 3"


def test_special_tokens_can_be_escaped(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"chat_template": "{{ messages[0].content }}"})
    messages = [{"role": "user", "content": "a<|end|>"}]
    assert opened(folder).chat.render(messages) == "a<|end|>"
    assert opened(folder, escape_special_tokens=True).chat.render(messages) == "a<\u2060|end|>"
