"""Host memory to GPU memory in overlapped chunks: the next one is converted while the last one travels."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 16 << 20
"""Large enough for a PCIe link's full speed, small enough that two of them are no burden on the host."""

_CHUNKS = 2


def pinned(nbytes: int) -> NDArray[np.uint8]:
    """Page-locked host memory, which the GPU copies from and to without waiting."""
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


class Uploader:
    """Sends arrays to the GPU through pinned chunks, each guarded by the event of the copy that reads it."""

    def __init__(self, stream: Any) -> None:
        import cupy

        self._stream = stream
        self._chunks = [(pinned(CHUNK_BYTES), cupy.cuda.Event()) for _ in range(_CHUNKS)]
        self._turn = 0

    def send(self, target: Any, values: NDArray[Any]) -> None:
        """Queue `target[...] = values`, converted to its dtype; both of one shape, at most CHUNK_BYTES."""
        chunk, event = self._chunks[self._turn]
        self._turn = (self._turn + 1) % _CHUNKS
        event.synchronize()
        staged = chunk[: target.nbytes].view(target.dtype).reshape(target.shape)
        np.copyto(staged, values, casting="unsafe")
        target.set(staged, stream=self._stream)
        event.record(self._stream)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        self._stream.synchronize()


def row_chunks(rows: int, row_nbytes: int, multiple: int) -> Iterator[slice]:
    """Rows cut into slices of at most CHUNK_BYTES, whose bounds are multiples of `multiple`, the end apart."""
    step = max(1, CHUNK_BYTES // (row_nbytes * multiple)) * multiple
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))
