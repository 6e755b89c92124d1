"""Without the extra test-cuda nothing here can be collected; the full matrix of kernels is for those who ask."""

from importlib.util import find_spec

import pytest

_HAS_EXTRA = find_spec("cupy") is not None and find_spec("nvidia") is not None
collect_ignore_glob = [] if _HAS_EXTRA else ["test_*.py"]


def pytest_report_header() -> str | None:
    """Say why tests are missing."""
    return None if _HAS_EXTRA else "tests/cuda: left out, they need the extra test-cuda (make test-cuda)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked cuda_all run only when `-m` names the mark: they take ten minutes."""
    if "cuda_all" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("cuda_all")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("cuda_all")]
