"""KernelRegistry: a kernel's source, defines and architecture to something that can be launched.

    source + included files + options + architecture --sha256--> file name --> cubin on disk --> RawModule

A cubin is looked for in ENGINE_CUBIN_DIR, in the package, in the user's cache; where it is in none of them NVRTC
compiles it into the cache. So a machine that has every cubin needs no NVRTC, and a changed source is never served
an old binary. A file's name ends with the digest of its contents: a damaged one is passed over, not loaded.
Read next: `engine/devices/cuda/nvrtc.py`, which compiles; `engine/devices/cuda/ops/`, which launch.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from engine.devices.cuda.nvrtc import compile_source
from engine.errors import ConfigError, DeviceFault
from loader.cache import cache_dir

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parents[3] / "cuda_src"
PACKAGED = Path(__file__).parent / "cubins"

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_OPTIONS = ("-std=c++17", "-default-device")


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """One compilation: a file below cuda_src/ and the macros it is configured by."""

    source: str
    defines: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, source: str, defines: Mapping[str, int]) -> "Variant":
        return cls(source, tuple(sorted(defines.items())))

    def __str__(self) -> str:
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.defines)])

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC options but for the architecture and where to find files."""
        return (*_OPTIONS, *(f"-D{name}={value}" for name, value in self.defines))


class Launchable(Protocol):
    """A RawKernel, or its double."""

    max_dynamic_shared_size_bytes: int

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int, stream: Any
    ) -> None: ...


class Kernel:
    """A kernel that can be launched.

    Arguments are CuPy arrays, or NumPy scalars of exactly the parameter's size: CuPy packs a Python int as int64.
    """

    def __init__(self, name: str, function: Launchable) -> None:
        self.name = name
        self._function = function
        self._shared_mem = 48 << 10  # what every launch may use without asking

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        stream: Any,
    ) -> None:
        """Launch; `shared_mem` bytes of dynamic shared memory. A grid of 0 is the caller's to skip: CuPy makes it 1."""
        if shared_mem > self._shared_mem:
            self._function.max_dynamic_shared_size_bytes = shared_mem
            self._shared_mem = shared_mem
        self._function(grid, block, args, shared_mem=shared_mem, stream=stream)


class KernelRegistry:
    """Kernels of one architecture, each compiled or read once.

    Attributes:
        arch: "sm_90", or "compute_90" for PTX, which the driver compiles.
    """

    def __init__(self, arch: str, sources: Path = SOURCES, folders: Sequence[Path] | None = None) -> None:
        """`folders` are searched in order; the last one is written to."""
        self.arch = arch
        self._sources = sources
        self._folders = cubin_folders() if folders is None else folders
        self._modules: dict[Variant, Any] = {}
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def get(self, source: str, name: str, defines: Mapping[str, int] | None = None) -> Kernel:
        """The kernel `name` of `source` under `defines`.

        Raises ConfigError when it is compiled nowhere and NVRTC is missing, DeviceFault when it does not compile.
        """
        key = (source, name, *(defines or {}).items())  # of every launch: cheaper than a Variant
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = Kernel(name, self._module(Variant.of(source, defines or {})).get_function(name))
            self._kernels[key] = kernel
        return kernel

    def load(self, variants: Iterable[Variant]) -> None:
        """Make sure that `get` will neither compile nor read a file for any of these."""
        wanted = sorted(set(variants))
        self.compile(wanted)
        for variant in wanted:
            self._module(variant)

    def compile(self, variants: Iterable[Variant]) -> list[Path]:
        """The file of each variant, compiled where there is none.

        One at a time: two threads gained 6% (NVRTC 13.0), and when its first two compilations ran at once, one failed.
        """
        return [self.binary(variant) for variant in variants]

    def binary(self, variant: Variant) -> Path:
        """The variant's file, compiled if it is in no folder."""
        for arch in _loadable(self.arch):
            if (found := self._find(self._key(variant, arch))) is not None:
                return found
        try:
            contents = compile_source(self._sources, variant.source, self.arch, variant.options)
        except DeviceFault as error:
            raise DeviceFault(f"{variant} for {self.arch}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{variant} is not compiled for {self.arch} and cannot be: {error}") from error
        return _store(self._folders[-1], self._key(variant, self.arch), contents)

    def _module(self, variant: Variant) -> Any:
        if variant not in self._modules:
            import cupy

            self._modules[variant] = cupy.RawModule(path=str(self.binary(variant)))
        return self._modules[variant]

    def _key(self, variant: Variant, arch: str) -> str:
        """Start of a file's name: readable, and unique for everything the compiler is given."""
        digest = hashlib.sha256(repr((cuda_major(), arch, variant.options)).encode())
        for path in sorted(included_files(self._sources, variant.source)):
            digest.update(f"\0{path}\0".encode() + (self._sources / path).read_bytes())
        return f"{variant.source.removesuffix('.cu').replace('/', '-')}-{arch}-{digest.hexdigest()[:32]}"

    def _find(self, key: str) -> Path | None:
        for folder in self._folders:
            for path in sorted(folder.glob(f"{key}.*")):
                if path.suffix != ".tmp" and path.name == _file_name(key, path.read_bytes()):
                    return path
                logger.warning("%s is damaged and is passed over", path)
        return None


def _file_name(key: str, contents: bytes) -> str:
    suffix = "cubin" if contents.startswith(b"\x7fELF") else "ptx"
    return f"{key}.{hashlib.sha256(contents).hexdigest()[:16]}.{suffix}"


def _store(folder: Path, key: str, contents: bytes) -> Path:
    """Write a file whole or not at all: other processes look for it at the same time."""
    path = folder / _file_name(key, contents)
    draft = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(contents)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{folder}: compiled kernels cannot be written there: {error.strerror or error}") from error
    return path


def _loadable(arch: str) -> Iterator[str]:
    """Architectures whose cubins run on `arch`, best first: its own and older ones of its generation."""
    yield arch
    if re.fullmatch(r"sm_\d+", arch):
        yield from (f"{arch[:-1]}{minor}" for minor in range(int(arch[-1]) - 1, -1, -1))


def included_files(sources: Path, source: str) -> set[str]:
    """`source` and every file of `sources` that it includes, by paths relative to `sources`."""
    found: set[str] = set()
    left = [source]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            includes = _INCLUDE.findall((sources / name).read_text())
            left += [include for include in includes if (sources / include).is_file()]
    return found


def cubin_folders() -> tuple[Path, ...]:
    """Where cubins are looked for; the last is where new ones go."""
    named = os.environ.get("ENGINE_CUBIN_DIR")
    return (*([Path(named)] if named else []), PACKAGED, cache_dir() / "cubins")


@cache
def cuda_major() -> int:
    """Major version of the CUDA that CuPy was built for: cubins of a newer one are not loaded by older drivers.

    Raises ConfigError without CuPy.
    """
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise ConfigError("CUDA kernels need CuPy; install engine-llm[cuda13], or [cuda12] for old drivers") from error
    return int(runtime.runtimeGetVersion()) // 1000
