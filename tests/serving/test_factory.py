"""What a checkpoint's tokenizer and end ids mean for prompts and ends. The tokenizers are real, the device is not."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.engine import LONG_TEXT
from engine.errors import InvalidRequest
from engine.text.tokenizer import TextTokenizer
from tests.engine.fake_device import expected
from tests.engine.server import collect, tokens_of
from tests.engine.test_engine import LLAMA, params, serving
from tests.loader.files import copy_checkpoint, write_json
from tests.text.samples import metaspace

BOS = 1


@pytest.fixture
def with_bos(tmp_path: Path) -> str:
    """A checkpoint whose tokenizer puts a BOS before a text, and whose chat template writes one, too."""
    folder = copy_checkpoint(LLAMA, tmp_path / "model")
    (folder / "tokenizer.json").write_text(metaspace().to_json())
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "chat_template": template})
    return str(folder)


async def test_a_chat_has_one_bos_and_raw_text_gets_one(monkeypatch: pytest.MonkeyPatch, with_bos: str) -> None:
    hello = metaspace().encode("Hello", add_special_tokens=False)
    async with serving(monkeypatch, model=with_bos) as (engine, _):
        chat = await engine.render_chat([{"role": "user", "content": "Hello"}])
        assert chat == await engine.tokenize("<s>Hello", add_special_tokens=False)
        assert chat[0] == BOS and chat.count(BOS) == 1 and len(chat) == 1 + len(hello)
        assert engine.generate(chat, params()).prompt_token_ids == chat
        assert engine.generate("Hello", params()).prompt_token_ids == [BOS, *hello]
        assert engine.generate("<s>Hello", params()).prompt_token_ids == [BOS, *chat]


async def test_an_empty_text_is_a_prompt_where_it_has_a_bos(monkeypatch: pytest.MonkeyPatch, with_bos: str) -> None:
    async with serving(monkeypatch, model=with_bos) as (engine, _):
        other = asyncio.create_task(tokens_of(engine.generate([5, 6], params(max_tokens=20))))
        assert await tokens_of(engine.generate("", params())) == expected([BOS], 4)
        with pytest.raises(InvalidRequest, match="prompt: is empty"):
            engine.generate([], params())
        assert await other == expected([5, 6], 20)


async def test_an_empty_text_is_refused_where_no_token_comes_of_it(
    monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    async with serving(monkeypatch, model=str(smollm2), kv_cache_memory_bytes=8 << 20) as (engine, _):
        other = asyncio.create_task(tokens_of(engine.generate([5, 6], params(max_tokens=20))))
        with pytest.raises(InvalidRequest, match="prompt: is empty"):
            engine.generate("", params())
        blank = engine.generate(" \n\t ", params())
        assert await tokens_of(blank) == expected(blank.prompt_token_ids, 4)
        assert await other == expected([5, 6], 20)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
async def test_every_end_id_of_the_checkpoint_ends_an_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    """The model emits one that only `file` has, as the second of two there."""
    ids = expected([5, 6], 30)
    end = next(i for i in ids[5:] if i < 512)
    ends = {"config.json": 511, "generation_config.json": 511, file: [510, end]}
    model = copy_checkpoint(LLAMA, tmp_path / "model", eos_token_id=ends["config.json"])
    write_json(model / "generation_config.json", {"eos_token_id": ends["generation_config.json"]})
    async with serving(monkeypatch, model=str(model)) as (engine, _):
        deltas = await collect(engine.generate([5, 6], params(max_tokens=30, ignore_eos=False)))
        assert [t for d in deltas for t in d.token_ids] == ids[: ids.index(end) + 1]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
        assert await tokens_of(engine.generate([5, 6], params(max_tokens=30))) == ids


@pytest.mark.parametrize("kind", ["text", "chat", "ids"])
async def test_what_is_long_is_tokenized_and_made_text_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, smollm2: Path, kind: str
) -> None:
    threads: list[int] = []
    name = "decode" if kind == "ids" else "encode"
    original = getattr(TextTokenizer, name)

    def noted(self: TextTokenizer, *args: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return original(self, *args, **options)

    monkeypatch.setattr(TextTokenizer, name, noted)
    async with serving(monkeypatch, model=str(smollm2), max_model_len=256, kv_cache_memory_bytes=12 << 20) as (e, _):
        threads.clear()
        for text in ("a", "a" * (LONG_TEXT + 1)):
            match kind:
                case "text":
                    assert await e.tokenize(text)
                case "chat":
                    assert await e.render_chat([{"role": "user", "content": text}])
                case "ids":
                    assert await e.detokenize([500] * len(text))
    here, elsewhere = threads
    assert here == threading.get_ident() != elsewhere


async def test_a_stop_string_that_is_a_special_token_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, smollm2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(monkeypatch, model=str(smollm2), kv_cache_memory_bytes=8 << 20) as (engine, _):
        for _ in range(2):
            await tokens_of(engine.generate([5, 6], params(stop=["<|im_end|>", "###"])))
        await tokens_of(engine.generate([5, 6], params(stop="<|im_start|>", skip_special_tokens=False)))
    told = [record.getMessage() for record in caplog.records if "stop string" in record.getMessage()]
    assert len(told) == 1 and "'<|im_end|>'" in told[0] and "stop_token_ids" in told[0]
