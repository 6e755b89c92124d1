"""How the cpu device compiles: Numba without the GIL, cached on disk under a key of these sources.

Numba invalidates a cached function when its own file changes, not when a function it calls does; the
folder is therefore named after a hash of every source that is compiled. `NUMBA_CACHE_DIR` overrides it.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numba

_COMPILED = ("devices/cpu/kernels", "devices/cpu/sampling")


def _cache_folder() -> Path:
    package = Path(__file__).parents[3]
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(path for folder in _COMPILED for path in (package / folder).glob("*.py")):
        digest.update(source.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "engine" / f"kernels-{digest.hexdigest()[:16]}"


if not os.environ.get("NUMBA_CACHE_DIR"):
    config: Any = numba.config
    config.CACHE_DIR = str(_cache_folder())

kernel: Any = numba.njit(nogil=True, cache=True)
"""Entry points called from Python."""

inner: Any = numba.njit
"""Functions called only by kernels: compiled into them."""
