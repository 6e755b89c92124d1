"""One place decides where caches are."""

from pathlib import Path

import pytest

from loader.cache import cache_dir


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ENGINE_CACHE_DIR": "/e", "XDG_CACHE_HOME": "/x"}, "/e"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/engine-llm"),
        ({"HOME": "/h"}, "/h/.cache/engine-llm"),
    ],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("ENGINE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)
