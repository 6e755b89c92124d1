"""Without the extra test-cuda nothing here can be collected.

A run of all tests marked cuda fails if a kernel of cuda_src/ was executed by none.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

_SOURCES = Path(__file__).parents[2] / "cuda_src"
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')

_HAS_EXTRA = find_spec("cupy") is not None and find_spec("nvidia") is not None
collect_ignore_glob = [] if _HAS_EXTRA else ["test_*.py"]


def pytest_report_header() -> str | None:
    """Say why tests are missing."""
    return None if _HAS_EXTRA else "tests/cuda: left out, they need the extra test-cuda (make test-cuda)"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    options = session.config.option
    if options.markexpr != "cuda" or options.keyword or session.config.args_source.name == "ARGS" or exitstatus:
        return
    from tests.gpu_without_gpu.executor import LAUNCHED

    declared = {name for path in _SOURCES.glob("*/*.cu") for name in _KERNEL.findall(path.read_text())}
    assert len(declared) > 10, "the pattern finds kernels"
    if missing := sorted(declared - LAUNCHED):
        print(f"\nno test executed: {', '.join(missing)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
