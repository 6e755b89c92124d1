"""Models by name, from a small hub on loopback, and GGUF files, each by a process of its own as a user starts it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.observe.model_info import _own_name
from loader.errors import CheckpointError
from loader.hub import model_folder
from tests.conftest import GOLDEN
from tests.loader.gguf_files import METADATA, golden_tensors, sentencepiece_vocab, write_gguf

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
FILES = {
    "config.json": (GOLDEN / "llama" / "config.json").read_bytes(),
    "model.safetensors": (GOLDEN / "llama" / "model.safetensors").read_bytes(),
    "original/consolidated.safetensors": b"the same once more",
    "README.md": b"not needed",
}


def file_entry(name: str) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(FILES[name]), "oid": hashlib.sha1(FILES[name]).hexdigest()}


class Hub(ThreadingHTTPServer):
    """Serves one model, `org/tiny`, to who has the token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        assert isinstance(hub, Hub)
        hub.asked.append(self.path)
        words = self.path.partition("?")[0].strip("/").split("/")
        if self.headers.get("authorization") != "Bearer secret":
            self.answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif words[:5] == ["api", "models", "org", "tiny", "tree"]:
            self.answer(200, json.dumps([file_entry(name) for name in FILES]).encode())
        elif words[:4] == ["api", "models", "org", "tiny"] and words[5] in COMMITS:
            about = {"id": "org/tiny", "sha": COMMITS[words[5]], "siblings": [{"rfilename": name} for name in FILES]}
            self.answer(200, json.dumps(about).encode())
        elif words[:3] == ["org", "tiny", "resolve"] and "/".join(words[4:]) in FILES:
            content = FILES["/".join(words[4:])]
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            self.answer(200, content, {"ETag": etag, "X-Repo-Commit": words[3]})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


def engine(hub: Hub, home: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    variables = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home), "HF_TOKEN": "secret"}
    command = [sys.executable, "-m", "engine", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | variables | environment, timeout=60, check=False
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_a_model_is_fetched_by_its_name_once(hub: Hub, tmp_path: Path) -> None:
    code, folder, err = engine(hub, tmp_path, "pull", "org/tiny")
    assert code == 0, err
    assert sorted(path.name for path in Path(folder).iterdir()) == ["config.json", "model.safetensors"]
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.asked.clear()
    assert engine(hub, tmp_path, "pull", "org/tiny")[:2] == (0, folder)
    assert not any("resolve" in path for path in hub.asked)
    assert engine(hub, tmp_path, "pull", "org/tiny", HF_HUB_OFFLINE="1")[:2] == (0, folder)
    code, other, _ = engine(hub, tmp_path, "pull", "org/tiny", "--revision", "v1")
    assert code == 0 and Path(other).name == COMMITS["v1"] != Path(folder).name


@pytest.mark.parametrize(
    ("name", "environment", "reason"),
    [
        ("org/nothing", {}, "404"),
        ("org/tiny", {"HF_TOKEN": "wrong"}, "401"),
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, "offline"),
        ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "refused"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
    hub: Hub, tmp_path: Path, name: str, environment: dict[str, str], reason: str
) -> None:
    code, out, err = engine(hub, tmp_path, "pull", name, **environment)
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith(f"engine: error: {name}: is no folder here, and cannot be fetched from the hub: ")
    assert reason in err.lower() or reason == "offline"
    assert "Traceback" not in err


def test_what_is_there_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert model_folder("org/tiny") == Path("org/tiny")
    for name in ("nothing", "/no/such/folder", "a/b/c", "../x"):
        assert model_folder(name) == Path(name)  # no name on the hub


def test_a_gguf_file_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf", METADATA | sentencepiece_vocab(["▁a"]), golden_tensors())
    folder = model_folder(str(file))
    assert folder.is_relative_to(tmp_path / "cache") and (folder / "config.json").exists()
    made = folder.stat().st_mtime_ns
    assert model_folder(str(file)) == folder and folder.stat().st_mtime_ns == made
    file.write_bytes(b"GGUF, cut off")
    with pytest.raises(CheckpointError):
        model_folder(str(file))


def test_what_clients_call_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "tiny.q4.gguf").touch()
    assert _own_name(str(tmp_path / "folder")) == "folder"
    assert _own_name(str(tmp_path / "tiny.q4.gguf")) == "tiny.q4"
    assert _own_name("org/tiny") == "org/tiny"
