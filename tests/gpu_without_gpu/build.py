"""NVRTC and g++, each behind a cache keyed by everything that goes in.

Artifacts live in build/gpu_without_gpu of the repository: PTX by source, options and headers; shared objects by C++
text, compiler and runtime sources. Processes may build at the same time: files appear by rename.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nvidia
from cupy_backends.cuda.libs import nvrtc

_ROOT = Path(__file__).resolve().parents[2]
_RUNTIME = Path(__file__).resolve().parent / "runtime"
_CACHE = _ROOT / "build" / "gpu_without_gpu"
_KERNEL_HEADERS = ("types.h", "convert.h", "arithmetic.h", "device.h")
# -O1: twice as fast to compile as -O2, and the kernel's time is in the runtime library.
_COMMON = ("-std=c++20", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off")
_KERNEL_FLAGS = (*_COMMON, "-O1", "-w", f"-I{_RUNTIME}")
_RUNTIME_FLAGS = (*_COMMON, "-O2", "-march=native", "-frounding-math", "-Wall", "-Wextra", "-Werror")


class CompileError(Exception):
    """NVRTC refused the source; the message is its log."""


def include_dirs() -> list[str]:
    """CUDA's headers, from the wheels."""
    return [str(path) for base in nvidia.__path__ if (path := Path(base) / "cu13" / "include").is_dir()]


def compile_ptx(
    source: str, options: Iterable[str], arch: str, name: str, name_expressions: Iterable[str]
) -> tuple[str, dict[str, str]]:
    """Compile to PTX, with line information.

    Returns the PTX and the mangled name of each name expression. Raises CompileError.
    """
    expressions = tuple(name_expressions)
    arguments = (
        *options, "-default-device", "-lineinfo", f"-arch={arch}", *(f"-I{path}" for path in include_dirs()),
    )  # fmt: skip
    key = _digest(source, name, *arguments, *expressions, str(nvrtc.getVersion()), *_headers(arguments))
    cached = _CACHE / "ptx" / key
    if not cached.exists():
        ptx, lowered = _nvrtc(source, arguments, name, expressions)
        _publish(cached, "\n".join((*lowered, ptx)).encode())
    *lowered_names, ptx = cached.read_text().split("\n", len(expressions))
    return ptx, dict(zip(expressions, lowered_names, strict=True))


def _nvrtc(source: str, arguments: tuple[str, ...], name: str, expressions: tuple[str, ...]) -> tuple[str, list[str]]:
    program = nvrtc.createProgram(source, name, (), ())
    try:
        for expression in expressions:
            nvrtc.addNameExpression(program, expression)
        nvrtc.compileProgram(program, arguments)
        ptx = nvrtc.getPTX(program)
        lowered = [nvrtc.getLoweredName(program, expression) for expression in expressions]
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{name}: {error}\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)
    return (ptx if isinstance(ptx, str) else ptx.decode()).rstrip("\0"), lowered


def _headers(arguments: tuple[str, ...]) -> list[str]:
    """The text of every header that the -I options of the repository reach."""
    cuda = [f"-I{path}" for path in include_dirs()]
    folders = [Path(a[2:]) for a in arguments if a.startswith("-I") and a not in cuda]
    return [file.read_text() for folder in folders for file in sorted(folder.rglob("*.cuh"))]


def runtime_library() -> Path:
    """The runtime library, built on first use."""
    sources = sorted(_RUNTIME.glob("*.cpp"))
    return _shared_object("runtime", tuple(map(str, sources)), _RUNTIME_FLAGS, _text(*sorted(_RUNTIME.iterdir())))


def kernel_library(cpp: str, name: str) -> Path:
    """One translated kernel as a shared object; it needs the runtime library loaded globally."""
    key = _digest(cpp, _text(*(_RUNTIME / name for name in _KERNEL_HEADERS)))
    source = _CACHE / "cpp" / f"{name[:80]}-{key[:16]}.cpp"
    if not source.exists():
        _publish(source, cpp.encode())
    return _shared_object(name[:80], (str(source),), _KERNEL_FLAGS, key)


def _shared_object(name: str, sources: tuple[str, ...], flags: tuple[str, ...], content: str) -> Path:
    library = _CACHE / "lib" / f"{name}-{_digest(content, *flags, _toolchain())[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / "built.so"
            result = subprocess.run(["g++", *flags, *sources, "-o", str(built)], capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"g++ failed on {name}:\n{result.stderr[:4000]}")
            os.replace(built, library)
    return library


@functools.cache
def _text(*files: Path) -> str:
    return "".join(file.read_text() for file in files)


@functools.cache
def _toolchain() -> str:
    """The compiler and the processor: -march=native must not meet another machine's cache."""
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return version + flags


def _digest(*parts: str) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode())
        state.update(b"\0")
    return state.hexdigest()


def _publish(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as scratch:
        scratch.write(data)
    os.replace(scratch.name, path)
