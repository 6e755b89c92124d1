"""Slot: the buffers of one step in flight, host and GPU side, and the events that guard them.

    host words --upload stream--> GPU words --kernels--> GPU results --download stream--> host results

A slot belongs to the host until its first upload, and again when the event of its download has happened. Nothing in
it is written while a copy or a kernel may still read it, so a step never waits for another's buffers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cuda.upload import pinned

SLOTS = 4
"""Two steps in flight, one being written, one being read."""


class Slot:
    """One step's words and results, both arrays of 32-bit integers.

    Attributes:
        arrived: the event of the results being on the host.
    """

    def __init__(self, words: int, result_words: int) -> None:
        import cupy

        self._words = _Pair(words)
        self._results = _Pair(result_words)
        self._used = self._sent = self._result_used = 0
        self._uploaded = cupy.cuda.Event(disable_timing=True)
        self._began, self._ended = cupy.cuda.Event(), cupy.cuda.Event()
        self.arrived = cupy.cuda.Event(block=True)  # a thread that waits for it sleeps

    def begin(self, compute: Any) -> None:
        """Forget the last step, whose copies have all happened."""
        self._used = self._sent = self._result_used = 0
        self._words.forget()
        self._results.forget()
        self._began.record(compute)

    def put(self, values: Any) -> int:
        """Append 32-bit words; where they begin. Arrays of other 4-byte types keep their bits."""
        array = np.ascontiguousarray(values)
        words = array.reshape(-1).view(np.int32) if array.dtype.itemsize == 4 else array.astype(np.int32).reshape(-1)
        first, self._used = self._used, self._used + len(words)
        self._words.reserve(self._used, keep=first)
        self._words.host[first : self._used] = words
        return first

    def upload(self, copies: Any, compute: Any) -> None:
        """Send what was appended since the last upload; kernels launched from now on see it."""
        if self._used == self._sent:
            return
        part = slice(self._sent, self._used)
        self._words.gpu[part].set(self._words.host[part], stream=copies)
        self._uploaded.record(copies)
        compute.wait_event(self._uploaded)
        self._sent = self._used

    @property
    def packed(self) -> Any:
        """The uploaded words on the GPU."""
        return self._words.gpu

    def room(self, words: int) -> slice:
        """Append room for results."""
        first, self._result_used = self._result_used, self._result_used + words
        self._results.reserve(self._result_used, keep=0)
        return slice(first, self._result_used)

    def results(self, part: slice, dtype: Any = np.int32) -> Any:
        """A part of the results on the GPU. Valid once all room has been taken."""
        return self._results.gpu[part].view(dtype)

    def download(self, copies: Any, compute: Any) -> None:
        """Bring the results to the host behind everything launched so far."""
        self._ended.record(compute)
        copies.wait_event(self._ended)
        if self._result_used:
            part = slice(0, self._result_used)
            self._results.gpu[part].get(stream=copies, out=self._results.host[part], blocking=False)
        self.arrived.record(copies)

    def read(self, part: slice, dtype: Any = np.int32) -> NDArray[Any]:
        """A copy of a part of the results on the host, once `arrived` has happened."""
        words: NDArray[Any] = self._results.host[part].copy()
        return words.view(dtype)

    def seconds(self) -> float:
        """Time from `begin` to the last kernel on the GPU, once `arrived` has happened."""
        import cupy

        return float(cupy.cuda.get_elapsed_time(self._began, self._ended)) / 1000


class _Pair:
    """Equally long buffers on both sides; outgrown ones live on until the step that uses them is over."""

    def __init__(self, words: int) -> None:
        self._outgrown: list[Any] = []
        self._allocate(words)

    def _allocate(self, words: int) -> None:
        import cupy

        self.host = pinned(4 * words).view(np.int32)
        self.gpu = cupy.empty((words,), np.int32)

    def reserve(self, words: int, keep: int) -> None:
        """Hold at least `words`; the first `keep` on the host survive."""
        if words <= len(self.host):
            return
        host, gpu = self.host, self.gpu
        self._outgrown += [host, gpu]
        self._allocate(max(words, 2 * len(host)))
        self.host[:keep] = host[:keep]

    def forget(self) -> None:
        self._outgrown.clear()
