"""The map is true: every room is on it, every path that a text names is there, every hint can be followed."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = sorted(path.stem for path in (ROOT / "engine").iterdir() if not path.name.startswith("_"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [path for folder in ("engine", "loader", "rpc") for path in sorted((ROOT / folder).rglob("*.py"))]
FOLDERS, ENDINGS = "engine|loader|rpc|tests|perf|cuda_src|docs|deploy", "py|md|cuh?|js|json|sh|ya?ml"
PATH = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/-]+\.(?:{ENDINGS})\b")


def diagram(text: str) -> str:
    """The block of indented lines behind the heading of the tour."""
    return text.split("## Tour\n\n")[1].split("\n\n")[0]


def test_the_readmes_diagram_leads_to_every_room() -> None:
    drawn = diagram((ROOT / "README.md").read_text())
    assert len(drawn.splitlines()) <= 15
    small = {"config", "errors", "network", "plan"}  # values that every room uses; the table below the diagram has them
    assert [room for room in ROOMS if room not in small and f"{room}/" not in drawn and f"{room}.py" not in drawn] == []


def test_every_room_has_its_place_in_the_order_of_imports() -> None:
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    placed = {name.strip() for layer in layers for name in layer.split("|")}
    assert placed == {"rpc", "loader", *(f"engine.{room}" for room in ROOMS)}


@pytest.mark.parametrize("path", [*TEXTS, *CODE], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_is_named_exists(path: Path) -> None:
    named = sorted(set(PATH.findall(path.read_text())))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_hint_to_install_names_this_package_and_an_extra_that_exists() -> None:
    hints = [hint for path in CODE for hint in re.findall(r"pip install '([^']+)'", path.read_text())]
    assert len(hints) > 5
    for hint in hints:
        name, _, extra = hint.rstrip("]").partition("[")
        assert name == "engine-llm" and extra in PROJECT["project"]["optional-dependencies"], hint


def test_no_generated_file_is_tracked() -> None:
    listed = subprocess.run(["git", "ls-files", "*_pb2*"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert listed.stdout == ""
