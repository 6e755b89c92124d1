"""Leaves the full matrix of kernels to those who ask for it."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked cuda_all run only when `-m` names the mark: they take ten minutes."""
    if "cuda_all" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("cuda_all")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("cuda_all")]
