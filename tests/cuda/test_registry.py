"""The kernel registry with the real NVRTC, which needs neither GPU nor driver."""

import sys
from pathlib import Path
from typing import Any

import pytest

from engine.devices.cuda import registry as registry_module
from engine.devices.cuda.registry import KernelRegistry, Variant, included_files
from engine.errors import ConfigError, DeviceFault

pytest.importorskip("cupy", reason="the registry compiles through CuPy's wrapper of NVRTC: install the extra test-cuda")

pytestmark = pytest.mark.cuda

SCALE = Variant.of("family/scale.cu", {"FACTOR": 3})


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    for name, text in {
        "family/scale.cu": '#include "common/factor.cuh"\n'
        'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= factor(); }\n',
        "common/factor.cuh": '#include "common/types.cuh"\n__device__ real factor() { return FACTOR; }\n',
        "common/types.cuh": "using real = float;\n",
        "common/other.cuh": "nobody includes this\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cubins"


def test_compiles_once_for_each_architecture_and_define(sources: Path, folder: Path) -> None:
    archs = ("sm_80", "sm_90", "sm_120")
    paths = [KernelRegistry(arch, sources, [folder]).binary(SCALE) for arch in archs]
    paths.append(KernelRegistry("sm_80", sources, [folder]).binary(Variant.of("family/scale.cu", {"FACTOR": 4})))
    assert len(set(paths)) == 4
    for arch, path in zip((*archs, "sm_80"), paths, strict=True):
        contents = path.read_bytes()
        assert contents.startswith(b"\x7fELF") and contents.endswith(b"\0") and f"-{arch}-" in path.name
        assert b"scale\0" in contents  # the kernel's symbol
    assert sorted(folder.iterdir()) == sorted(paths)


def test_a_cubin_that_is_there_needs_no_nvrtc(sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_backends.cuda.libs import nvrtc

    def missing() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    made = KernelRegistry("sm_90", sources, [folder]).binary(SCALE)
    monkeypatch.setattr(nvrtc, "getVersion", missing)
    registry = KernelRegistry("sm_90", sources, [folder])
    assert registry.binary(SCALE) == made
    with pytest.raises(ConfigError, match=r"scale.cu FACTOR=4 is not compiled for sm_90 .*libnvrtc.so.13.*cuda13"):
        registry.binary(Variant.of("family/scale.cu", {"FACTOR": 4}))


def test_folders_are_searched_in_order_and_only_the_last_is_written(sources: Path, tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    made = KernelRegistry("sm_90", sources, [first, last]).binary(SCALE)
    assert made.parent == last and not first.exists()
    copied = first / made.name
    first.mkdir()
    copied.write_bytes(made.read_bytes())
    assert KernelRegistry("sm_90", sources, [first, last]).binary(SCALE) == copied


@pytest.mark.parametrize("name", ["family/scale.cu", "common/factor.cuh", "common/types.cuh"])
def test_a_changed_file_is_compiled_again(sources: Path, folder: Path, name: str) -> None:
    before = KernelRegistry("sm_90", sources, [folder]).binary(SCALE)
    (sources / name).write_text((sources / name).read_text() + "// changed\n")
    assert KernelRegistry("sm_90", sources, [folder]).binary(SCALE) != before
    assert included_files(sources, "family/scale.cu") == {"family/scale.cu", "common/factor.cuh", "common/types.cuh"}


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_cubin_is_passed_over(
    sources: Path, folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = KernelRegistry("sm_90", sources, [folder]).binary(SCALE)
    contents = bytearray(path.read_bytes())
    whole = bytes(contents)
    if damage == "cut":
        del contents[len(contents) // 2 :]
    else:
        contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    assert KernelRegistry("sm_90", sources, [folder]).binary(SCALE).read_bytes() == whole
    assert "damaged" in caplog.text


def test_an_older_cubin_of_the_generation_serves_a_newer_gpu(sources: Path, folder: Path) -> None:
    made = KernelRegistry("sm_80", sources, [folder]).binary(SCALE)
    assert KernelRegistry("sm_86", sources, [folder]).binary(SCALE) == made
    assert KernelRegistry("sm_90", sources, [folder]).binary(SCALE) != made


def test_a_source_that_does_not_compile_shows_the_log(sources: Path, folder: Path) -> None:
    with pytest.raises(DeviceFault, match=r'family/scale.cu for sm_90: common/factor.cuh\(2\).*"FACTOR" is undefined'):
        KernelRegistry("sm_90", sources, [folder]).binary(Variant("family/scale.cu"))
    assert not folder.exists()


def test_an_unknown_architecture_is_named(sources: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"NVRTC \d+\.\d+ does not know sm_999, the newest it knows is sm_\d+"):
        KernelRegistry("sm_999", sources, [folder]).binary(SCALE)


def test_a_folder_that_cannot_be_written_is_named(sources: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(ConfigError, match=f"{blocked}: compiled kernels cannot be written there"):
        KernelRegistry("sm_90", sources, [blocked]).binary(SCALE)


def test_kernels_load_once_and_raise_shared_memory_only_when_needed(
    sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    raised: list[int] = []
    launches: list[tuple[Any, ...]] = []

    class Function:
        max_dynamic_shared_size_bytes = property(fset=lambda self, value: raised.append(value))

        def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int, stream: Any) -> None:
            launches.append((grid, block, args, shared_mem, stream))

    class RawModule:
        def __init__(self, *, path: str) -> None:
            loaded.append(path)

        def get_function(self, name: str) -> Function:
            return Function()

    monkeypatch.setattr(sys.modules["cupy"], "RawModule", RawModule)
    registry = KernelRegistry("sm_90", sources, [folder])
    registry.load([SCALE, SCALE])
    kernel = registry.get("family/scale.cu", "scale", {"FACTOR": 3})
    assert registry.get("family/scale.cu", "scale", {"FACTOR": 3}) is kernel
    assert loaded == [str(registry.binary(SCALE))]
    for size in (0, 48 << 10, 100 << 10, 64 << 10, 101 << 10):
        kernel((1,), (32,), (7,), shared_mem=size, stream="s")
    assert raised == [100 << 10, 101 << 10]
    assert launches[2] == ((1,), (32,), (7,), 100 << 10, "s")


def test_the_environment_comes_first_and_the_cache_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ENGINE_CUBIN_DIR", str(tmp_path / "named"))
    folders = registry_module.cubin_folders()
    assert folders[0] == tmp_path / "named" and folders[-1] == tmp_path / "cache" / "cubins"
