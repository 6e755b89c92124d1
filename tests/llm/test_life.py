"""Start, close and exit of an LLM: its thread and its engine end, whoever forgets them."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine import LLM
from engine.errors import ConfigError, DeviceFault, EngineStopped
from tests.conftest import GOLDEN
from tests.llm.conftest import ScriptedEngine

ROOT = Path(__file__).parents[2]


async def test_works_where_a_loop_is_running_as_in_jupyter(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m") as llm:
        assert llm.generate("ab")[0].outputs[0].text == "<97><98>"


def test_reset_prefix_cache(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m") as llm:
        assert llm.reset_prefix_cache() is True
    assert scripted.last.resets == 1


def test_close_ends_the_engine_and_its_thread(scripted: type[ScriptedEngine]) -> None:
    llm = LLM(model="m")
    thread = llm._thread._thread
    assert scripted.last.is_open
    llm.close()
    llm.close()
    assert not scripted.last.is_open
    assert not thread.is_alive()
    with pytest.raises(EngineStopped, match="closed"):
        llm.generate("a")


def test_close_while_another_thread_generates(scripted: type[ScriptedEngine]) -> None:
    submitted = threading.Event()
    scripted.answer = lambda *_: submitted.set()
    llm = LLM(model="m")
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate("a")
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=generate)
    other.start()
    submitted.wait()
    llm.close()
    other.join()
    assert [type(e) for e in errors] == [EngineStopped]


def test_dropping_the_llm_closes_it(scripted: type[ScriptedEngine]) -> None:
    llm = LLM(model="m")
    thread = llm._thread._thread
    llm.generate("a")
    del llm
    gc.collect()
    assert not scripted.last.is_open
    assert not thread.is_alive()


def run_script(folder: Path, code: str) -> tuple[int, str, str]:
    """A user's script in `folder`, run from a working directory that has an engine/ of its own."""
    (folder / "script").mkdir()
    (folder / "script" / "main.py").write_text(code)
    (folder / "work" / "engine").mkdir(parents=True)
    (folder / "work" / "engine" / "__init__.py").write_text("raise SystemExit('the wrong engine')")
    done = subprocess.run(
        [sys.executable, folder / "script" / "main.py"],
        cwd=folder / "work", env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_exit_without_close_closes_the_engine(tmp_path: Path) -> None:
    code = """
import engine.llm

class Engine:
    def __init__(self, config): pass
    async def __aenter__(self): return self
    async def __aexit__(self, *_): print("closed")

engine.llm.Engine = Engine
llm = engine.llm.LLM(model="m")
"""
    assert run_script(tmp_path, code) == (0, "closed\n", "")


def test_exit_without_close_ends_the_cpu_worker(tmp_path: Path) -> None:
    code = f"""
from engine import LLM, SamplingParams
llm = LLM(model={str(GOLDEN / "llama")!r}, device="cpu", max_model_len=64, kv_cache_memory_bytes=1 << 20, cpu_threads=1)
print(len(llm.generate({{"prompt_token_ids": [1, 2]}}, SamplingParams(max_tokens=3))[0].outputs[0].token_ids))
"""
    status, out, err = run_script(tmp_path, code)
    told = [line for line in err.splitlines() if not line.startswith("Loading weights: ")]  # on a slow machine
    assert (status, out, len(told)) == (0, "3\n", 1) and "has no tokenizer.json" in told[0]


def test_error_at_start_is_raised_and_leaves_no_thread(scripted: type[ScriptedEngine]) -> None:
    scripted.start_error = DeviceFault("no memory")
    before = threading.active_count()
    with pytest.raises(DeviceFault, match="no memory"):
        LLM(model="m")
    assert threading.active_count() == before


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_memory"):
        LLM(model="m", gpu_memory=1)
