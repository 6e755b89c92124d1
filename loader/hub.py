"""Models that are no folder: a name, `org/model`, is fetched from the Hugging Face hub; a GGUF file is imported.

Both happen once. The hub's files lie in its own cache (`HF_HOME`), whose rules hold: `HF_TOKEN` for models that ask for
one, `HF_ENDPOINT` for another hub, `HF_HUB_OFFLINE` for none; a download that stopped goes on where it was. Imports
lie in our cache.
"""

import hashlib
import re
from pathlib import Path

from loader.cache import cache_dir
from loader.errors import MAX_SHOWN, CheckpointError

FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
NOT_WANTED = ("original/*", "consolidated*", "onnx/*")
"""The same weights once more, in other forms."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def model_folder(model: str, revision: str | None = None) -> Path:
    """The folder that `model` is, or that is made of it. Raises CheckpointError.

    Args:
        revision: branch, tag or commit of a model on the hub.
    """
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return _imported(path)
    if path.exists() or not _NAME.fullmatch(model):
        return path
    return fetch(model, revision)


def fetch(name: str, revision: str | None = None) -> Path:
    """The snapshot of a model on the hub, fetched if it is not there. Raises CheckpointError."""
    from huggingface_hub import snapshot_download  # it takes 0.3 s to import

    try:
        found = snapshot_download(name, revision=revision, allow_patterns=list(FILES), ignore_patterns=list(NOT_WANTED))
    except Exception as error:  # of the hub's, of its HTTP client's, of the disk: there is no common base
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (lines or [type(error).__name__])[0][:MAX_SHOWN]
        raise CheckpointError(name, [f"is no folder here, and cannot be fetched from the hub: {reason}"]) from error
    return Path(found)


def _imported(gguf: Path) -> Path:
    from loader.gguf import import_gguf

    about = gguf.resolve(), gguf.stat().st_size, gguf.stat().st_mtime_ns
    digest = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    folder = cache_dir() / "imports" / f"{gguf.stem}-{digest}"
    return folder if folder.exists() else import_gguf(gguf, folder)
