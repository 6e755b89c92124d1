"""The command `engine compile`."""

from pathlib import Path
from typing import Any

import click

from engine.cli.debuggable import debuggable
from engine.config import EngineConfig

_ALL = "sm_80,sm_89,sm_90,sm_100,sm_120"
"""One of each generation that differs; a cubin runs on later members of its own."""


@click.command("compile")
@click.option("--arch", default=_ALL, show_default=True, help="GPU architectures, separated by commas.")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="Folder for the cubins.")
@click.option("--model", help="Compile what this model needs; everything there is if not given.")
@click.option("--dtype", default="auto", show_default=True, help="As given to `engine serve`, as all that follow.")
@click.option("--kv-cache-dtype", default="auto", show_default=True)
@click.option("--quantization", default="auto", show_default=True)
@click.option("--block-size", default=16, show_default=True)
@debuggable
def compile_kernels(arch: str, output: Path, model: str | None, **flags: Any) -> None:
    """Compile the CUDA kernels, so that no compiler is needed where they run; needs no GPU.

    Set ENGINE_CUBIN_DIR to the folder there.
    """
    from engine.devices.cuda.compile import compile_cubins

    config = None if model is None else EngineConfig(model=model, **flags)
    for line in compile_cubins(arch.split(","), output, config):
        click.echo(line)
