"""The commands `engine inspect` and `engine models`. Read next: `engine/cli/model/facts.py`, imported when they run."""

import json
from typing import Any

import click

from engine.cli.debuggable import debuggable
from engine.cli.settings import LAYERS
from engine.config import EngineConfig


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
@LAYERS.options(EngineConfig)
@debuggable
def inspect(as_json: bool, **flags: Any) -> None:
    """Say what MODEL is, and what of it fits on this machine; nothing is loaded."""
    from engine.cli.model.facts import model_facts

    sections = model_facts(EngineConfig(**flags))
    if as_json:
        click.echo(json.dumps(sections, indent=2))
        return
    for heading, facts in sections.items():
        click.echo(heading)
        for name, value in facts.items():
            click.echo(f"  {name.removesuffix('_bytes').replace('_', ' '):<24} {_shown(name, value)}")


@click.command()
@debuggable
def models() -> None:
    """List the architectures that are loaded, as config.json names them."""
    from engine.cli.model.facts import architectures

    for name, model_type in architectures():
        click.echo(f"{name:<24} {model_type}")


def _shown(name: str, value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:,}" if isinstance(value, int) else str(value)
