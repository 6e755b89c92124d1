"""A team of threads that run one compiled function together, each with its own index.

Inside a call the members meet at spinning barriers; between calls the helpers sleep on a lock, so an idle
server takes no processor time. The caller is member 0.
"""

import threading
from collections.abc import Callable
from typing import Any

from engine.devices.cpu.numkong import configure_thread


class Team:
    """Threads 1 .. size - 1, started at once and stopped by `close`. Not itself thread-safe: one caller."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._work: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._error: BaseException | None = None
        self._start = [threading.Semaphore(0) for _ in range(size - 1)]
        self._finished = threading.Semaphore(0)
        configure_thread()
        self._threads = [
            threading.Thread(target=self._member, args=(index,), name=f"cpu-{index}", daemon=True)
            for index in range(1, size)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args, index, size)` in every member and wait for all. Raises what any of them raised."""
        self._work, self._error = (function, args), None
        for start in self._start:
            start.release()
        self._call(0)
        for _ in self._threads:
            self._finished.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._work = None
        for start in self._start:
            start.release()
        for thread in self._threads:
            thread.join()

    def _member(self, index: int) -> None:
        configure_thread()
        while True:
            self._start[index - 1].acquire()
            if self._work is None:
                return
            self._call(index)
            self._finished.release()

    def _call(self, index: int) -> None:
        assert self._work is not None
        function, args = self._work
        try:
            function(*args, index, self.size)
        except BaseException as error:  # handed to the caller of run()
            self._error = error
