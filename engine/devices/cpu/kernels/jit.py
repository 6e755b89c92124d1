"""How the cpu device compiles: Numba without the GIL, each function by itself, cached on disk by what it is made of.

Numba compiles a cached function again when its own file changes, not when one changes that it calls into. So a
function's cache folder is named after its file and a hash of every source that is compiled into it: the file and,
transitively, the files that it imports from. An edit of one kernel compiles that kernel's family, and no other.
`NUMBA_CACHE_DIR` overrides the place. Where nothing can be written, code is compiled in memory.
"""

import hashlib
import inspect
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import types

from loader.cache import cache_dir

logger = logging.getLogger(__name__)

LEAST_FREE_BYTES = 64 << 20
"""Kernels take 2 MiB. Numba's own complaint about a full disk is a traceback."""

_IMPORT = re.compile(r"^from (engine\.devices\.cpu\.(?:kernels|sampling)\.\w+) import", re.MULTILINE)
"""Parsing instead would add 0.1 s to a start."""

_OP = types.void(*[types.int64] * 7)

inner: Any = numba.njit
"""Functions called only by other compiled functions: compiled into them."""


def kernel(function: Callable[..., None]) -> Any:
    """A function called from Python; compiled when it first is."""
    return _compiled(function, lambda keep: numba.njit(nogil=True, cache=keep)(function))


class entry:
    """A function `(address of op, rows, items, begin, end, parts, thread)` that the interpreter calls by address."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: Any = None
        self._lock = threading.Lock()  # a model is built while its kernels are loaded, and asks for them meanwhile

    @property
    def address(self) -> int:
        """Of the machine code; compiled, or read from the cache, when first asked for."""
        with self._lock:
            if self._compiled is None:
                self._compiled = _compiled(self._function, lambda keep: numba.cfunc(_OP, cache=keep)(self._function))
            return int(self._compiled.address)


_lock = threading.Lock()  # the place of a function's cache is passed in a global of Numba's


def _compiled(function: Callable[..., None], compile: Callable[[bool], Any]) -> Any:
    if os.environ.get("NUMBA_CACHE_DIR"):
        return compile(True)
    folder, config = cache_dir() / "kernels", numba.config
    if not can_keep(folder):
        return compile(False)
    with _lock:
        config.CACHE_DIR = str(folder / cache_name(Path(inspect.getfile(function))))  # type: ignore[attr-defined]
        return compile(True)


@cache
def can_keep(folder: Path) -> bool:
    """Whether compiled code can be written there; says once if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            logger.warning("kernels are compiled now, which takes a minute; later starts read them from %s", folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
        if free >= LEAST_FREE_BYTES:
            return True
        reason = f"{free} bytes are free"
    except OSError as error:
        reason = error.strerror or str(error)
    logger.warning("kernels are compiled at every start, which takes a minute: %s: %s", folder, reason)
    return False


@cache
def cache_name(source: Path) -> str:
    """Folder of what is compiled from a file: its name and a hash of all that is compiled into it."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(sources_of(source)):
        digest.update(path.read_bytes())
    return f"{source.stem}-{digest.hexdigest()[:16]}"


def sources_of(source: Path) -> set[Path]:
    """A file and the compiled sources that it imports from, directly or not."""
    root, found, left = source.parents[4], set[Path](), [source]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += [root / f"{module.replace('.', '/')}.py" for module in _IMPORT.findall(path.read_text())]
    return found
