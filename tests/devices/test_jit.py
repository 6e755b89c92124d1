"""What a compiled function's cache is named after: all that is compiled into it, and no more."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.devices.cpu.kernels.constants import LINEAR
from engine.devices.cpu.kernels.entries import ENTRIES
from engine.devices.cpu.kernels.jit import cache_name, can_keep, sources_of

DEVICE = Path("engine/devices/cpu")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The device's sources, free to be changed."""
    return Path(shutil.copytree(Path(__file__).parents[2] / DEVICE, tmp_path / DEVICE))


def names(sources: set[Path]) -> set[str]:
    return {path.stem for path in sources}


def test_a_family_is_made_of_what_it_imports(copy: Path) -> None:
    kernels, sampling = copy / "kernels", copy / "sampling"
    assert names(sources_of(kernels / "rope.py")) == {"rope", "bits", "simd", "constants", "jit"}
    attention = names(sources_of(kernels / "attention_bfloat16.py"))
    assert {"attention_bfloat16", "attention", "codegen", "simd"} <= attention
    assert not attention & {"attention_float32", "matmul", "matmul_int8", "ops", "rope", "sampler"}
    assert names(sources_of(sampling / "sampler.py")) == {"sampler", "philox", "jit"}
    team = names(sources_of(kernels / "teamwork.py"))
    assert not team & {"linear", "linear_int8", "ops", "rope", "gated", "matmul", "matmul_int8"}


def test_an_edit_changes_the_place_of_its_own_family_alone(copy: Path) -> None:
    families = [copy / "kernels" / f"{name}.py" for name in ("rope", "attention_bfloat16", "linear_int8", "teamwork")]
    before = [cache_name(family) for family in families]
    (copy / "kernels" / "matmul_int8.py").open("a").write("# changed\n")
    cache_name.cache_clear()
    after = [cache_name(family) for family in families]
    cache_name.cache_clear()
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]


def test_what_cannot_be_kept_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert can_keep(tmp_path / "new" / "kernels")
    (record,) = caplog.records
    assert "are compiled now, which takes a minute" in record.getMessage()
    (tmp_path / "new" / "kernels" / "one").mkdir()
    can_keep.cache_clear()
    assert can_keep(tmp_path / "new" / "kernels") and len(caplog.records) == 1
    caplog.clear()
    (tmp_path / "file").touch()
    for _ in range(2):
        assert not can_keep(tmp_path / "file" / "kernels")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert not can_keep(tmp_path)
    assert [r.getMessage().rpartition(": ")[2] for r in caplog.records] == ["Not a directory", "1000 bytes are free"]


def test_functions_are_compiled_when_they_are_first_asked_for() -> None:
    linear = ENTRIES[LINEAR]
    assert linear.address == linear.address > 0
