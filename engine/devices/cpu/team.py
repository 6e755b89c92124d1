"""A team of threads: replays programs together, or runs any compiled function once in each.

Within a step the helpers stay in compiled code and look for the next run; without work they soon sleep on a lock,
so an idle server takes no processor time. The caller is thread 0.
Read next: `engine/devices/cpu/kernels/teamwork.py`.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cpu.kernels.teamwork import WAKE, begin, board_words, follow, lead, place
from engine.devices.cpu.numkong import configure_thread


class Team:
    """Threads 1 .. size - 1, started at once and stopped by `close`. Not itself thread-safe: one caller.

    `max_ops` is the length of the longest program.
    """

    def __init__(self, size: int, max_ops: int) -> None:
        self.size = size
        self._board = np.zeros(board_words(size, max_ops), np.int64)
        self._address = self._board.ctypes.data
        self._work: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._error: BaseException | None = None
        self._awake = [threading.Lock() for _ in range(size)]
        self._finished = threading.Semaphore(0)
        configure_thread()
        self._threads = [
            threading.Thread(target=self._help, args=(index,), name=f"cpu-{index}", daemon=True)
            for index in range(1, size)
        ]
        for lock in self._awake:
            lock.acquire()
        for thread in self._threads:
            thread.start()

    def replay(self, table: NDArray[np.int64], rows: int, items: int) -> None:
        """Run `table` [ops, columns] over `rows` rows and `items` attention items."""
        self._begin(table.ctypes.data, len(table), rows, items)
        lead(self._address, self.size)

    def run(self, units: int, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args, index, size)` in every thread and wait for all. Raises what any of them raised.

        A single unit of work is not worth telling the others: the caller does it, as a team of one.
        """
        if units < 2:
            function(*args, 0, 1)
            return
        self._work, self._error = (function, args), None
        self._begin(0, 0, 0, 0)
        self._call(0)
        for _ in self._threads:
            self._finished.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._work = None
        self._begin(0, 0, 0, 0)
        for thread in self._threads:
            thread.join()

    def _begin(self, table: int, ops: int, rows: int, items: int) -> None:
        if begin(self._address, table, ops, rows, items, self.size):
            for index in range(1, self.size):
                if self._board[place(index, WAKE)]:
                    self._board[place(index, WAKE)] = 0
                    self._awake[index].release()

    def _help(self, index: int) -> None:
        configure_thread()
        while True:
            if not follow(self._address, index, self.size):
                self._awake[index].acquire()
            elif self._work is None:
                return
            else:
                self._call(index)
                self._finished.release()

    def _call(self, index: int) -> None:
        assert self._work is not None
        function, args = self._work
        try:
            function(*args, index, self.size)
        except BaseException as error:  # handed to the caller of run()
            self._error = error
