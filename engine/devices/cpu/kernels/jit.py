"""How the cpu device compiles: Numba without the GIL, each function by itself, cached on disk by what it is made of.

Numba compiles a cached function again when its own file changes, not when one changes that it calls into. So a
function's cache folder is named after its file and a hash of every source that is compiled into it: the file and,
transitively, the files that it imports from. An edit of one kernel compiles that kernel's family, and no other.
`NUMBA_CACHE_DIR` overrides the place.
"""

import ast
import hashlib
import inspect
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import types

from loader.cache import cache_dir

_COMPILED = ("engine.devices.cpu.kernels.", "engine.devices.cpu.sampling.")
_OP = types.void(*[types.int64] * 7)

inner: Any = numba.njit
"""Functions called only by other compiled functions: compiled into them."""


def kernel(function: Callable[..., None]) -> Any:
    """A function called from Python; compiled when it first is."""
    return _cached(function, lambda: numba.njit(nogil=True, cache=True)(function))


class entry:
    """A function `(address of op, rows, items, begin, end, parts, thread)` that the interpreter calls by address."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: Any = None

    @property
    def address(self) -> int:
        """Of the machine code; compiled, or read from the cache, when first asked for."""
        if self._compiled is None:
            self._compiled = _cached(self._function, lambda: numba.cfunc(_OP, cache=True)(self._function))
        return int(self._compiled.address)


_lock = threading.Lock()  # the place of a function's cache is passed in a global of Numba's


def _cached(function: Callable[..., None], compile: Callable[[], Any]) -> Any:
    if os.environ.get("NUMBA_CACHE_DIR"):
        return compile()
    config: Any = numba.config
    with _lock:
        config.CACHE_DIR = str(cache_dir() / "kernels" / cache_name(Path(inspect.getfile(function))))
        return compile()


@cache
def cache_name(source: Path) -> str:
    """Folder of what is compiled from a file: its name and a hash of all that is compiled into it."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(sources_of(source)):
        digest.update(path.read_bytes())
    return f"{source.stem}-{digest.hexdigest()[:16]}"


def sources_of(source: Path) -> set[Path]:
    """A file and the compiled sources that it imports from, directly or not."""
    root, found, left = source.parents[len(_COMPILED[0].split(".")) - 1], set[Path](), [source]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_COMPILED):
                    left.append(root / f"{(node.module or '').replace('.', '/')}.py")
    return found
