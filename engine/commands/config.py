"""What `engine config` prints: every setting, its value and where that comes from."""

import json
import os

import click

from engine.settings import Layers, effective_settings, settings_lines, unknown_variables


def print_settings(layers: Layers, as_json: bool) -> None:
    """Settings on stdout; on stderr, variables that look like settings and are none."""
    settings = list(effective_settings())
    if as_json:
        rows = {s.name: {"value": s.value, "origin": s.origin, "source": s.source or None} for s in settings}
        click.echo(json.dumps(rows, indent=2))
    else:
        for line in settings_lines(settings):
            click.echo(line)
    for variable in unknown_variables(os.environ, layers.known):
        click.echo(f"engine: note: no such setting: {variable}", err=True)
