"""Every known failure has a test that exists, or a missing capability with its reason (tests/cases.toml)."""

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = tomllib.loads((TESTS / "cases.toml").read_text())  # a key twice is an error of the format
NUMBERS = {
    "L": (1, 3, 4, 5, 8, 10, 13, 15, 16, 17, 19, 22, 24, 27, 29, 30),
    "T": (1, 5, 6, 10, 12, 13, 15, 17),
    "S": (1, 2, 4, 5, 7, 8, 11, 12, 14, 16, 21),
    "K": (1, 4, 5, 10, 12, 15, 16, 18, 19, 21, 23, 25),
    "R": (1, 3, 4, 5, 7, 8, 10, 12, 18, 19, 20, 22),
    "N": (1, 2, 5, 6, 8),
}
IDS = [f"{kind}{number:02}" for kind, numbers in NUMBERS.items() for number in numbers]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Tests of a file, by its syntax: what cannot be imported here still counts."""
    functions = (n for n in ast.parse(path.read_text()).body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return frozenset(f.name for f in functions if f.name.startswith("test_"))


def test_every_case_is_there() -> None:
    assert len(IDS) == len(set(IDS)) == 64
    assert sorted(CASES) == sorted(IDS)


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_tests(case: str) -> None:
    entry = CASES[case]
    assert entry.keys() == {"title", "tests"}
    assert all(entry.values()), "nothing is empty"
    tests = entry["tests"]
    assert len(set(tests)) == len(tests)
    for test in tests:
        file, _, name = test.partition("::")
        assert (TESTS / file).is_file(), f"{file} does not exist"
        assert name in names_in(TESTS / file), f"{file} has no test {name}"
