"""Defaults of generation: generation_config.json, and the end ids that config.json names too.

End ids are the union of both files', and must be token ids. The sampling defaults are advice: one that is out of
range is left out with a warning, as a model is not worse for it.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loader.errors import CheckpointError
from loader.fields import read_json_object

GENERATION_FILE = "generation_config.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Defaults of generation; None where the checkpoint says nothing.

    Attributes:
        eos_token_ids: ids that end a generation, each once; may be empty.
        max_new_tokens: a default, and the most of any request, as in vLLM.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def ending_at(self, token_id: int) -> "GenerationConfig":
        """The same, with one more end id."""
        return replace(self, eos_token_ids=tuple(dict.fromkeys([*self.eos_token_ids, token_id])))

    def without_defaults(self) -> "GenerationConfig":
        """The ids alone."""
        return GenerationConfig(eos_token_ids=self.eos_token_ids, bos_token_id=self.bos_token_id)

    def overridden(self, values: Mapping[str, Any]) -> "GenerationConfig":
        """With other defaults; null takes one away. Raises ValueError that names one that cannot be."""
        for name, value in values.items():
            if name not in _RANGES:
                raise ValueError(f"{name}: is not one of {', '.join(_RANGES)}")
            if value is not None and (problem := _problem(name, value)):
                raise ValueError(f"{name}: {problem}")
        return replace(self, **values)


_RANGES: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 1e38),
    "top_p": (float, 1e-9, 1.0),
    "top_k": (int, 0, (1 << 31) - 1),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 1e-3, 1e3),
    "max_new_tokens": (int, 1, 1 << 40),
}
"""Type and range of each default; those of SamplingParams."""
SAMPLING_DEFAULTS = tuple(name for name in _RANGES if name != "max_new_tokens")


def _problem(name: str, value: Any) -> str | None:
    kind, low, high = _RANGES[name]
    allowed = (int, float) if kind is float else (int,)
    if type(value) in allowed and math.isfinite(value) and low <= value <= high:
        return None
    noun = "an integer" if kind is int else "a number"
    return f"{str(value)[:40]} is not {noun} from {0 if low < 1e-6 else low:g} to {high:g}"


def read_generation(folder: Path, config: Mapping[str, Any], vocab_size: int) -> GenerationConfig:
    """What `folder` says, and `config`, its config.json, of ends. Raises CheckpointError."""
    file = folder / GENERATION_FILE
    generation = read_json_object(file) if file.exists() else {}
    problems: list[str] = []
    ids = [
        token
        for name, source in ((GENERATION_FILE, generation), ("config.json", config))
        for token in _token_ids(name, source.get("eos_token_id"), vocab_size, problems)
    ]
    if problems:
        raise CheckpointError(folder, problems)
    bos = generation.get("bos_token_id", config.get("bos_token_id"))
    return GenerationConfig(
        eos_token_ids=tuple(dict.fromkeys(ids)),
        bos_token_id=bos if type(bos) is int and 0 <= bos < vocab_size else None,
        **{name: _default(file, name, generation.get(name)) for name in _RANGES},
    )


def _default(file: Path, name: str, value: Any) -> Any:
    if value is None or (name == "top_p" and value == 0):  # some folders have 0 for "not given"
        return None
    if problem := _problem(name, value):
        logger.warning("%s: %s: %s; it is ignored", file, name, problem)
        return None
    return float(value) if _RANGES[name][0] is float else value


def _token_ids(file: str, value: Any, vocab_size: int, problems: list[str]) -> list[int]:
    """The valid ones of an id, a list of ids or null; the others go to `problems`."""
    ids = []
    for token in [] if value is None else value if isinstance(value, list) else [value]:
        if type(token) is int and 0 <= token < vocab_size:
            ids.append(token)
        else:
            problems.append(f"{file}: eos_token_id: {str(token)[:40]} is not a token id below {vocab_size}")
    return ids
