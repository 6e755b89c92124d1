"""Small changes to the scheduler's and the KV manager's code, each of which their suites must notice."""

import subprocess
import sys

import pytest

from tests.mutation.run import accepted, all_mutants


def test_what_is_accepted_is_there() -> None:
    names = {(m.module, m.name) for m in all_mutants()}
    assert {(module, name) for module, reasons in accepted().items() for name in reasons} <= names


@pytest.mark.mutation
@pytest.mark.timeout(0)
def test_mutants_are_caught(request: pytest.FixtureRequest) -> None:
    sample = int(request.config.getoption("--mutants"))
    command = [sys.executable, "-m", "tests.mutation.run", *(["--sample", str(sample)] if sample else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
