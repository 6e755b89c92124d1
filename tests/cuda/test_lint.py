"""What holds for all sources of kernels, by reading them. Launch arguments are checked by the CuPy double."""

import re
from pathlib import Path

import pytest

from engine.devices.cuda.registry import SOURCES

pytestmark = pytest.mark.cuda

OPS = Path(__file__).parents[2] / "engine" / "devices" / "cuda" / "ops"
FILES = sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cu*"))
KERNELS = [name for name in FILES if name.endswith(".cu")]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^{;]*?\)\s*)?(\w+)\s*\(')


def code(name: str) -> str:
    """The file without its comments."""
    return _COMMENT.sub("", (SOURCES / name).read_text())


def test_there_are_sources() -> None:
    assert KERNELS and "common/ptx.cuh" in FILES


@pytest.mark.parametrize("name", FILES)
def test_inline_assembly_is_in_one_file_only(name: str) -> None:
    assert bool(re.search(r"\basm\b", code(name))) == (name == "common/ptx.cuh")


@pytest.mark.parametrize("name", FILES)
def test_includes_are_our_own_files(name: str) -> None:
    """So that a machine with NVRTC but without the toolkit's headers can compile."""
    for include in re.findall(r"#\s*include\s*(\S+)", code(name)):
        assert include.startswith('"') and (SOURCES / include.strip('"')).is_file(), include


@pytest.mark.parametrize("name", FILES)
def test_the_first_line_is_the_idea(name: str) -> None:
    first = (SOURCES / name).read_text().splitlines()[0]
    assert re.match(r"// \S.{15,}", first), first


@pytest.mark.parametrize("name", FILES)
def test_no_name_nvrtc_lacks(name: str) -> None:
    """NVRTC has no <cmath>: INFINITY and friends compile with nvcc only."""
    assert not re.search(r"\b(INFINITY|NAN|FLT_MAX|printf)\b", code(name))


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_launched_by_its_family(name: str) -> None:
    family = name.split("/")[0]
    launcher = (OPS / f"{family}.py").read_text()
    kernels = _KERNEL.findall(code(name))
    assert kernels
    assert name in launcher, f"{family}.py never names {name}"
    for kernel in kernels:
        assert kernel in launcher, f"{family}.py never launches {kernel} of {name}"
