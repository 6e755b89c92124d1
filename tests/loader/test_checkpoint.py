"""Folders: what is read, what may be missing, and what is said when they are wrong."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.generation import GenerationConfig
from tests.loader.files import GOLDEN, LLAMA, copy_checkpoint, write_json
from tests.text.samples import metaspace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_checkpoint(LLAMA, tmp_path / "model")


def problems(path: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    return caught.value.problems


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("llama*")), ids=lambda p: p.name)
def test_golden_folders_open(path: Path) -> None:
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.path == path
    assert checkpoint.generation == GenerationConfig(eos_token_ids=(2,), bos_token_id=1)
    assert checkpoint.chat_template is None and checkpoint.special_tokens == {}
    assert checkpoint.load_tokenizer() is None


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (2, {"eos_token_id": [2, 7]}, (2, 7)),
        (2, {"eos_token_id": 7}, (7, 2)),
        ([2, 7], {}, (2, 7)),
        ([2, 7], None, (2, 7)),
        (..., {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": None}, ()),
        (2, None, (2,)),
    ],
)
def test_l24_end_tokens_are_the_union(
    folder: Path, config_eos: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    path = copy_checkpoint(folder, folder.with_name("edited"), eos_token_id=config_eos)
    if generation is None:
        (path / "generation_config.json").unlink()
    else:
        write_json(path / "generation_config.json", generation)
    assert open_checkpoint(path).generation.eos_token_ids == expected


@pytest.mark.parametrize("value", [True, [2, True], "2", [2, 512], -1, 2.0, {}])
def test_l24_end_tokens_that_are_none(folder: Path, value: Any) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": value})
    (problem,) = problems(folder)
    assert problem.startswith("generation_config.json: eos_token_id: ")


def test_l24_end_tokens_of_config_json_are_checked_too(folder: Path) -> None:
    path = copy_checkpoint(folder, folder.with_name("edited"), eos_token_id=True)
    assert problems(path) == ("config.json: eos_token_id: True is not a token id below 512",)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000, b""])
def test_broken_json_names_the_file(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as caught:
        open_checkpoint(folder)
    assert caught.value.path == folder / name


def test_generation_defaults(folder: Path) -> None:
    write_json(folder / "generation_config.json", {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "bos_token_id": 3})
    assert open_checkpoint(folder).generation == GenerationConfig(
        eos_token_ids=(2,), bos_token_id=3, temperature=0.6, top_p=0.9, top_k=50
    )


def test_a_top_p_of_0_leaves_the_default_to_the_engine(folder: Path) -> None:
    """No request could be served with it."""
    write_json(folder / "generation_config.json", {"top_p": 0, "temperature": 0})
    generation = open_checkpoint(folder).generation
    assert (generation.top_p, generation.temperature) == (None, 0)


def test_generation_defaults_out_of_range_are_left_out_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"temperature": -1, "top_p": 1.1, "top_k": -1, "min_p": "x", "repetition_penalty": 0, "max_new_tokens": 0.5}
    write_json(folder / "generation_config.json", bad | {"eos_token_id": 2})
    assert open_checkpoint(folder).generation == GenerationConfig(eos_token_ids=(2,), bos_token_id=1)
    told = [record.getMessage() for record in caplog.records]
    assert [message.split(": ")[1] for message in told] == list(bad)
    assert "generation_config.json: top_p: 1.1 is not a number from 0 to 1; it is ignored" in told[1]


def test_further_templates_are_files(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert checkpoint.chat_template == "plain"


def test_path_errors(tmp_path: Path) -> None:
    assert "no such folder" in problems(tmp_path / "nowhere")[0]
    (tmp_path / "file").write_text("")
    assert "is a file" in problems(tmp_path / "file")[0]
    (tmp_path / "empty").mkdir()
    assert problems(tmp_path / "empty") == ("has no config.json",)
    assert "too long" in problems(tmp_path / ("x" * 300))[0]


def test_a_folder_that_may_not_be_read_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel would answer, which lets root read everything."""
    stat = Path.stat

    def refuse(self: Path, **options: Any) -> Any:
        if self.parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    assert problems(folder) == ("cannot be read: Permission denied",)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ x }}", "{{ x }}"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
        (None, None),
    ],
)
def test_chat_template_of_tokenizer_config(folder: Path, template: Any, expected: str | None) -> None:
    write_json(folder / "tokenizer_config.json", {"chat_template": template})
    assert open_checkpoint(folder).chat_template == expected


def test_chat_template_file_wins(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"chat_template": "config"})
    (folder / "chat_template.jinja").write_text("file\n{{ é }}", encoding="utf-8")
    assert open_checkpoint(folder).chat_template == "file\n{{ é }}"


def test_chat_template_that_is_none(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"chat_template": 5})
    with pytest.raises(CheckpointError, match="chat_template: expected a string"):
        open_checkpoint(folder)


def test_special_tokens(folder: Path) -> None:
    write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "pad_token": None,
            "add_bos_token": True,
        },
    )
    assert open_checkpoint(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_broken_tokenizer_names_the_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
        open_checkpoint(folder).load_tokenizer()


def test_ids_beyond_the_tokenizer_decode_to_empty_text(smollm2: Path) -> None:
    """The rule for padded vocabularies."""
    tokenizer = open_checkpoint(smollm2).load_tokenizer()
    assert tokenizer is not None
    hello = tokenizer.encode("Hello there").ids
    padding = tokenizer.get_vocab_size() + 5
    assert tokenizer.decode([padding]) == ""
    assert tokenizer.decode([hello[0], padding, *hello[1:]]) == "Hello there"


def test_a_post_processor_that_names_an_absent_token(folder: Path) -> None:
    """tokenizers itself panics at the first text, which is no Exception."""
    tokenizer = json.loads(metaspace().to_json())
    tokenizer["post_processor"]["single"][0]["SpecialToken"]["id"] = "<nope>"
    write_json(folder / "tokenizer.json", tokenizer)
    with pytest.raises(CheckpointError, match="post_processor: '<nope>' is not among its special_tokens"):
        open_checkpoint(folder).load_tokenizer()
    write_json(
        folder / "tokenizer.json",
        tokenizer | {"post_processor": {"type": "Sequence", "processors": [tokenizer["post_processor"]]}},
    )
    with pytest.raises(CheckpointError, match="post_processor: '<nope>'"):
        open_checkpoint(folder).load_tokenizer()


@pytest.mark.parametrize("value", ["x" * 5000, ["x" * 5000], {"a": "x" * 5000}, 10**4000])
def test_errors_repeat_no_more_than_200_characters_of_a_value(folder: Path, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name in ("hidden_act", "model_type", "vocab_size", "rope_scaling", "torch_dtype", "what_is_this"):
        write_json(folder / "config.json", config | {name: value})
        assert all(len(problem) < 500 for problem in problems(folder))


def test_defaults_that_change_the_output_are_told_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_checkpoint(folder)
    assert not caplog.records
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_theta", "rope_parameters", "rope_scaling", "tie_word_embeddings"):
        config.pop(name, None)
    write_json(folder / "config.json", config | {"attn_implementation": "sdpa"})
    open_checkpoint(folder)
    told = [record.getMessage().removeprefix(f"{folder / 'config.json'}: ") for record in caplog.records]
    assert told == ["rope_theta is missing, 10000 is taken", "tie_word_embeddings is missing, false is taken"]
