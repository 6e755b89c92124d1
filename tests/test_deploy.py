"""What deploy/ and the Dockerfile say about the engine: settings, ports, paths and extras that must exist."""

import re
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from engine.config import EngineConfig
from rpc.options import ServerOptions

ROOT = Path(__file__).parent.parent
FILES = ("Dockerfile", "deploy/compose.yaml", "deploy/kubernetes.yaml")
SETTINGS = {f"ENGINE_{f.name.upper()}" for options in (EngineConfig, ServerOptions) for f in fields(options)}


@pytest.mark.parametrize("name", FILES)
def test_every_variable_is_a_setting(name: str) -> None:
    used = set(re.findall(r"\bENGINE_[A-Z_]+\b", (ROOT / name).read_text()))
    assert used <= SETTINGS


@pytest.mark.parametrize("name", [*FILES, "deploy/sizes.py", "docs/deploy.md"])
def test_every_extra_exists(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    used = re.findall(r"EXTRAS[=:] ?([a-z0-9]+(?:,[a-z0-9]+)*)", (ROOT / name).read_text())
    assert {extra for group in used for extra in group.split(",")} <= set(extras)


def test_the_grace_of_the_manifests_is_longer_than_a_drain() -> None:
    compose, kubernetes = ((ROOT / name).read_text() for name in FILES[1:])
    seconds = [*re.findall(r"stop_grace_period: (\d+)s", compose), *re.findall(r"PeriodSeconds: (\d+)", kubernetes)]
    assert len(seconds) == 3 and min(map(int, seconds)) > ServerOptions().grace


def test_the_context_has_what_the_wheel_is_built_from() -> None:
    """.dockerignore lets through every file that the build configuration names."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    others = {"pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "deploy/install.sh"}
    assert others | set(wheel["only-include"]) == allowed


def test_install_script_is_valid_shell() -> None:
    subprocess.run(["sh", "-n", ROOT / "deploy" / "install.sh"], check=True)
