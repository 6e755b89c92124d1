"""Which mutants of the scheduler and the KV manager their suites catch: `python -m tests.mutation.run [--sample N]`.

Tests are imported once; each mutant is a fork that has its code and runs them until one fails. One that hangs is
stopped by its limit of time and counts as caught.
"""

import contextlib
import os
import random
import resource
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import click
import pytest
from hypothesis import settings

from tests.mutation.mutants import Mutant, apply, mutants_of

ROOT = Path(__file__).parents[2]
MODULES = (
    *(f"engine.schedule.{name}" for name in ("order", "roster", "scheduler", "sequence", "settle", "step")),
    *(f"engine.kv.{name}" for name in ("events", "fence", "groups", "manager", "pool", "prefix")),
)
_SCHEDULE = ("sequence", "roster", "deferred", "settle", "forks", "prefix_hits", "order", "scheduler", "histories")
SUITES = (
    *(f"tests/kv/test_{name}.py" for name in ("fence", "prefix", "manager", "events")),
    *(f"tests/schedule/test_{name}.py" for name in _SCHEDULE),
    *("tests/kv/test_pool.py", "tests/engine/test_choices.py", "tests/engine/test_constrained.py"),
)
"""The quick ones first."""

OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--timeout", "20", "-k", "not 4-400")
PROCESSOR_SECONDS = 20
MEMORY = 3 << 30


def all_mutants() -> list[Mutant]:
    """Of all modules."""
    return [m for name in MODULES for m in mutants_of(name, (ROOT / f"{name.replace('.', '/')}.py").read_text())]


def accepted() -> dict[str, dict[str, str]]:
    """Mutants that no test can or need notice: why, by name, by module."""
    modules: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "accepted.toml").read_text())
    return modules


def survivors(mutants: Sequence[Mutant], workers: int) -> Iterator[Mutant]:
    """Those that no test notices, as they are found."""
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    settings.register_profile("mutation", derandomize=True, database=None)
    settings.load_profile("mutation")
    with silence():
        assert pytest.main(["--collect-only", *OPTIONS, *SUITES]) == 0
    left, running = list(reversed(mutants)), dict[int, Mutant]()
    while left or running:
        while left and len(running) < workers:
            mutant = left.pop()
            running[start(mutant)] = mutant
        pid, status = os.wait()
        mutant = running.pop(pid)
        if os.waitstatus_to_exitcode(status) == 0:
            yield mutant


def start(mutant: Mutant) -> int:
    """A process that ends with 0 if the mutant survives."""
    pid = os.fork()
    if pid:
        return pid
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    code = 1
    try:
        with silence():
            apply(mutant, import_module(mutant.module))
            code = int(pytest.main([*OPTIONS, *SUITES]))
    finally:
        os._exit(code)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing is printed inside, not even by a crash."""
    kept = [os.dup(fd) for fd in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(nowhere, fd)
        yield
    finally:
        sys.stdout.flush()
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(nowhere)


@click.command()
@click.option("--sample", type=int, help="Run so many, drawn evenly; all if not given.")
@click.option("--only", default="", help="Modules whose name contains this.")
@click.option("--workers", type=int, default=os.cpu_count(), show_default=True)
def main(sample: int | None, only: str, workers: int) -> None:
    """Print the survivors as they are found, then how many mutants ran and how many were caught.

    Exits with 1 if one survived that accepted.toml gives no reason for.
    """
    mutants = [m for m in all_mutants() if only in m.module]
    if sample is not None:
        mutants = random.Random(len(mutants)).sample(mutants, min(sample, len(mutants)))
    known, new, reasons = 0, 0, accepted()
    for mutant in survivors(mutants, workers):
        is_known = mutant.name in reasons.get(mutant.module, {})
        known, new = known + is_known, new + (not is_known)
        click.echo(f"{'accepted' if is_known else 'SURVIVED'} {mutant}")
    caught = len(mutants) - known - new
    click.echo(f"{len(mutants)} mutants: {caught} caught ({caught / len(mutants):.1%}), {known} accepted, {new} new")
    sys.exit(new > 0)


if __name__ == "__main__":
    main()
