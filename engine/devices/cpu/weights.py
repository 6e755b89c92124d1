"""Weights as the kernels read them: packed panels, float32 vectors, and the embedding where it lies.

One tensor at a time goes from the memory map into its packed form, and its pages are given back; only the embedding
is gathered from the map itself, so that a tied one has no second unpacked copy.
"""

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.devices.cpu.layout import ALIGNMENT, aligned_bytes, padded, panel_widths
from engine.devices.cpu.products import Product
from loader.weights import WeightSource

_ARENA_NBYTES = 64 << 20
"""Memory is taken in runs of this size: NumPy asks for huge pages for arrays of 4 MiB and more, and a layer's weights
are smaller. What is not written takes no memory."""

EMBEDDING_CODES = {np.dtype(np.float32): 0, np.dtype(ml_dtypes.bfloat16): 1, np.dtype(np.float16): 2}


@dataclass(slots=True)
class Weights:
    """Asked for by name at link time; keeps what it handed out addresses of.

    Attributes:
        product: decides the dtype and the packing.
        threads: panels are cut so that each thread gets equally many.
        pool: packs panels in parallel.
        advance: told the bytes of every tensor done.
    """

    source: WeightSource
    product: Product
    threads: int
    pool: Executor
    advance: Callable[[int], None]
    nbytes: int = 0
    _kept: list[NDArray[Any]] = field(default_factory=list)
    _arena: NDArray[np.uint8] = field(default_factory=lambda: aligned_bytes(0))

    def embedding(self, name: str) -> tuple[int, int]:
        """Address of the tensor's own memory, and its dtype's code."""
        tensor = np.ascontiguousarray(self.source.tensor(name))
        self._kept.append(tensor)
        return tensor.ctypes.data, EMBEDDING_CODES[tensor.dtype]

    def vector(self, names: Sequence[str]) -> int:
        """Address of the tensors side by side as float32, zero up to the next whole vector; 0 for none."""
        if not names:
            return 0
        parts = [self.source.tensor(name) for name in names]
        width = sum(len(part) for part in parts)
        values = self._keep(4 * padded(width)).view(np.float32)
        values[:] = 0.0
        np.concatenate(parts, out=values[:width], casting="unsafe")
        self.advance(sum(part.nbytes for part in parts))
        return int(values.ctypes.data)

    def panels(self, names: Sequence[str], alternating: bool = False) -> tuple[int, int, int]:
        """Pack the tensors' rows as one weight; address and length of its panel table, parts of a panel.

        With `alternating`, a part has a unit of each tensor's rows, zeros where a tensor has no more.
        """
        tensors = [self.source.tensor(name) for name in names]
        rows = [tensor.astype(self.product.dtype, copy=False) for tensor in tensors]
        unit = self.product.unit
        if alternating:
            whole = [np.pad(r, ((0, -len(r) % unit), (0, 0))).reshape(-1, unit, r.shape[1]) for r in rows]
            rows, unit = [np.stack(whole, 1).reshape(-1, rows[0].shape[1])], unit * len(rows)
        weight = np.ascontiguousarray(rows[0] if len(rows) == 1 else np.concatenate(rows))
        widths = panel_widths(len(weight), self.threads, unit)
        sizes = [_aligned(self.product.packed_nbytes(width, weight.shape[1])) for width in widths]
        memory = self._keep(sum(sizes))
        table = np.zeros((len(widths), 3), np.int64)
        table[:, 0] = memory.ctypes.data + np.cumsum([0, *sizes[:-1]])
        table[:, 1] = np.cumsum([0, *widths[:-1]])
        table[:, 2] = widths
        self._kept.append(table)
        list(self.pool.map(lambda p: self.product.pack(weight[p[1] : p[1] + p[2]], int(p[0])), table))
        for tensor in tensors:
            release_pages(tensor)
            self.advance(tensor.nbytes)
        parts = 1 if self.product.dots_address else -(-widths[0] // unit)
        return int(table.ctypes.data), len(table), parts

    def _keep(self, nbytes: int) -> NDArray[np.uint8]:
        if nbytes > len(self._arena):
            self._arena = aligned_bytes(max(nbytes, _ARENA_NBYTES))
        memory, self._arena = self._arena[:nbytes], self._arena[_aligned(nbytes) :]
        self._kept.append(memory)
        self.nbytes += nbytes
        return memory


def packed_nbytes(product: Product, n: int, k: int, threads: int) -> int:
    """Memory that `Weights.panels` takes for an [n, k] weight."""
    return sum(_aligned(product.packed_nbytes(width, k)) for width in panel_widths(n, threads, product.unit))


def release_pages(tensor: NDArray[Any]) -> None:
    """Drop a tensor's pages from this process when it is a view of a memory map; the file's cache keeps them."""
    base: Any = tensor
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    offset = tensor.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (offset + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        base.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
