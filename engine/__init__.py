"""An LLM inference engine on one asyncio loop. Read next: `engine/engine.py`, `engine/llm.py`.

The public names are imported on first use, so that a module below this package (the cpu device's
worker process imports some) does not pay for all of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.llm import LLM
    from engine.request.params import SamplingParams
    from engine.request.structured import StructuredOutputs

    __version__: str

__all__ = ["LLM", "Engine", "EngineConfig", "SamplingParams", "StructuredOutputs", "__version__"]

_HOME = {
    "LLM": "engine.llm",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "SamplingParams": "engine.request.params",
    "StructuredOutputs": "engine.request.structured",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # 30 ms that only this name should cost

        return version("engine-llm")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
