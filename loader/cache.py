"""Where everything lies that can be made again: imported models, compiled kernels of both devices, the tests' tools."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """ENGINE_CACHE_DIR, else XDG_CACHE_HOME/engine-llm, else ~/.cache/engine-llm."""
    if explicit := os.environ.get("ENGINE_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "engine-llm"
