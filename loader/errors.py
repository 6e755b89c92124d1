"""The one error the loader raises for a checkpoint it refuses."""

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint that cannot be loaded; lists everything wrong, not only the first thing.

    Attributes:
        path: the folder or file in question.
        problems: one line each, naming tensor or field, what was expected and what was found.
    """

    def __init__(self, path: Path | str, problems: Sequence[str]) -> None:
        self.path = Path(path)
        self.problems = tuple(problems)
        lines = self.problems if len(self.problems) == 1 else ["", *(f"  - {p}" for p in self.problems)]
        super().__init__(f"{path}: " + "\n".join(lines))


MAX_SHOWN = 200
"""Characters of somebody's value that an error repeats."""


def shown(value: object) -> str:
    """A value as Python writes it, as far as an error repeats it."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write out very long ones
    text = repr(value[:MAX_SHOWN] if isinstance(value, str | bytes) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
