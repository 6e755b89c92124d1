"""`import engine`: cheap, and with the names it promises."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import engine


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, engine; names = set(sys.modules); "
        "assert not names & {'asyncio', 'numpy', 'tokenizers', 'jinja2', 'grpc', 'uvloop'}, names; "
        "assert not any(n.startswith('engine.') for n in names); "
        "from engine import EngineConfig, SamplingParams; assert 'uvloop' not in sys.modules; "
        "assert {'LLM', 'Engine', '__version__'} <= set(dir(engine)); print(engine.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="LMM"):
        engine.LMM  # noqa: B018


def test_hints_name_extras_that_there_are() -> None:
    """`pip install 'engine-llm[...]'` in messages, README and docs."""
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*root.glob("*.md"), *root.glob("docs/*.md")]
    files += [file for folder in ("engine", "loader", "rpc", "perf") for file in (root / folder).rglob("*.py")]
    named = {
        name.strip()
        for file in files
        for group in re.findall(r"engine-llm\[([a-z0-9, ]+)\]", file.read_text(encoding="utf-8"))
        for name in group.split(",")
    }
    assert len(named) > 5 and named <= extras.keys()
