"""Commands that README and docs show: each is one that the command line takes as it is written."""

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from engine.cli.main import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_COMMAND = re.compile(r"^(?:    )+(?:\$ )?((?:[A-Z_]+=\S+ )*engine [a-z].*)$", re.MULTILINE)


def commands() -> list[Any]:
    """Arguments of every `engine ...` line; a line that ends in a backslash goes on."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for match in _COMMAND.finditer(text):
            command = re.split(r"\s+#|[|&;>]\s*", match[1])[0]
            words = shlex.split(command.replace("$(python -m loader.demo)", "MODEL"))
            arguments = [word for word in words[words.index("engine") + 1 :] if word != "--help"]
            found.append(pytest.param(arguments, id=f"{page.name}: {command[:60]}"))
    return found


@pytest.mark.parametrize("arguments", commands())
def test_a_command_of_the_docs_is_taken(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags exist and take those values; what it does when it runs is tested where the command is."""
    monkeypatch.chdir(tmp_path)
    for word in arguments[1:]:
        if word.endswith((".gguf", ".jsonl", ".json", ".toml")):  # files that the reader has
            (tmp_path / word).write_text("{}")
    with click.Context(cli) as context:
        name, command, rest = cli.resolve_command(context, arguments)
        assert command is not None and name == arguments[0]
        command.make_context(name, rest, parent=context)
