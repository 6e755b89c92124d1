"""Teamwork: how the threads of a team run a program together without waiting for one that has no processor.

Threads take an op's work part by part and go on when every part is done, not when every thread has arrived: who is
late, or was never woken, has just done nothing. Only a thread that loses its processor in the middle of a part is
waited for. Everything is told through the board, int64s that all threads share:

    0            the run's number; odd while the caller writes what follows
    1 .. 4       table's address, ops, rows, items; 0 ops: there is something to do in Python
    8 (1 + t)    thread t's line: processor, whether it sleeps, whether to wake it, the last run it saw, a set of
                 processors (2 x 16 words)
    words        one word per op: run << 32 | parts done << 16 | parts taken

A word carries its run, so a straggler can't take a part of a later one; the caller may begin the next run
while stragglers are still in the last. Read next: `engine/devices/cpu/team.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import sys
from typing import Any

import numpy as np
from numba import types

from engine.devices.cpu.kernels.constants import COLUMNS
from engine.devices.cpu.kernels.interpreter import do_parts, parts_of
from engine.devices.cpu.kernels.jit import inner, kernel
from engine.devices.cpu.kernels.native import atomic_load, atomic_store, compare_and_swap, usleep
from engine.devices.cpu.kernels.simd import i64_pointer

LINE = 48
"""Words of a thread's line."""

PROCESSOR, ASLEEP, WAKE, SEEN, _MASK, _ELSEWHERE = 0, 1, 2, 3, 8, 24
_MASK_BYTES = 128
_RUN, _TABLE, _OPS, _ROWS, _ITEMS = 0, 1, 2, 3, 4
_DONE, _FIELD = 1 << 16, (1 << 16) - 1

_SPINS = 4_000
"""Loads before a waiting thread looks where the others are, 2 us: most waits are shorter."""
_NAPS_AFTER = 400_000
"""Loads before it sleeps in between, 0.2 ms: its processor goes to whoever keeps the one it waits for from running."""
_NAP_MICROSECONDS = 20
_IDLE_SPINS = 400_000
"""Loads before a helper without work goes to sleep, 0.2 ms: longer than the Python between two runs of a step."""


def board_words(threads: int, ops: int) -> int:
    """Words of a board."""
    return LINE * (1 + threads) + ops


def place(thread: int, what: int) -> int:
    """Where a word of a thread's line is."""
    return LINE * (1 + thread) + what


_place: Any = inner(place)

if sys.platform == "linux":
    sched_getcpu: Any = types.ExternalFunction("sched_getcpu", types.int32())
    sched_getaffinity: Any = types.ExternalFunction(
        "sched_getaffinity", types.int32(types.int32, types.int64, types.int64)
    )
    sched_setaffinity: Any = types.ExternalFunction(
        "sched_setaffinity", types.int32(types.int32, types.int64, types.int64)
    )

    @inner
    def _note_processor(board, thread):
        processor = np.int64(sched_getcpu())
        if board[_place(thread, PROCESSOR)] != processor:
            atomic_store(board, _place(thread, PROCESSOR), processor)

    @inner
    def move_away(board, board_address, thread, threads):
        """Leave this processor if another thread of the team was last on it, for one where none was.

        Linux wakes a thread where its waker runs when the others look busy, and then leaves the two there: the
        second processor idled in two thirds of a decoding SmolLM2's time.
        """
        _note_processor(board, thread)
        here, shared = board[_place(thread, PROCESSOR)], False
        mask, elsewhere = _place(thread, _MASK), _place(thread, _ELSEWHERE)
        if sched_getaffinity(0, _MASK_BYTES, board_address + 8 * mask) != 0:
            return
        for i in range(_MASK_BYTES // 8):
            board[elsewhere + i] = board[mask + i]
        for other in range(threads):
            if other != thread:
                processor = atomic_load(board, _place(other, PROCESSOR))
                shared = shared or processor == here
                if 0 <= processor < 8 * _MASK_BYTES:
                    board[elsewhere + processor // 64] &= ~(np.int64(1) << (processor % 64))
        if shared and sched_setaffinity(0, _MASK_BYTES, board_address + 8 * elsewhere) == 0:
            sched_setaffinity(0, _MASK_BYTES, board_address + 8 * mask)
            _note_processor(board, thread)

else:

    @inner
    def _note_processor(board, thread):
        """Only Linux says."""

    @inner
    def move_away(board, board_address, thread, threads):
        """Only Linux lets a thread choose."""


@inner
def _take(board, at, tag, parts, threads, done):
    """Report `done` parts of the op whose word is at `at`, and take its next, [begin, end).

    None if all are taken, or the run is over. Guided self-scheduling (Polychronopoulos and Kuck, 1987): half of a fair
    share of what is left, so that neighbours in memory mostly go to one thread, and who is slow has little in hand
    at the end.
    """
    word = atomic_load(board, at)
    while word >> 32 == tag and (done > 0 or word & _FIELD < parts):
        begin = word & _FIELD
        count = (parts - begin + 2 * threads - 1) // (2 * threads)
        seen = compare_and_swap(board, at, word, word + _DONE * done + count)
        if seen == word:
            return begin, begin + count
        word = seen
    return parts, parts


@inner
def _wait(board, board_address, at, tag, parts, thread, threads):
    """Wait until all parts are done; False if the run is over."""
    waited = 0
    while True:
        word = atomic_load(board, at)
        if word >> 32 != tag:
            return False
        if word >> 16 & _FIELD == parts:
            return True
        waited += 1
        if waited == _SPINS:
            move_away(board, board_address, thread, threads)
        elif waited >= _NAPS_AFTER:
            usleep(np.uint32(_NAP_MICROSECONDS))


@inner
def _run(board, board_address, run, table_address, ops, rows, items, thread, threads):
    tag = run >> 1 & 0x7FFFFFFF
    for i in range(ops):
        address, at = table_address + 8 * COLUMNS * i, LINE * (1 + threads) + i
        op = i64_pointer(address)
        parts = parts_of(op, rows, items)
        begin, end = _take(board, at, tag, parts, threads, 0)
        while begin < end:
            do_parts(op, address, rows, items, begin, end, parts, thread)
            begin, end = _take(board, at, tag, parts, threads, end - begin)
        _note_processor(board, thread)
        if not _wait(board, board_address, at, tag, parts, thread, threads):
            return


@kernel
def begin(board_address, table_address, ops, rows, items, threads):
    """Open a run; how many helpers sleep, whose WAKE is set now. Only the caller's thread."""
    board = i64_pointer(board_address)
    run = board[_RUN] + 2
    atomic_store(board, _RUN, run - 1)
    for i in range(ops):
        board[LINE * (1 + threads) + i] = (run >> 1 & 0x7FFFFFFF) << 32
    board[_TABLE], board[_OPS], board[_ROWS], board[_ITEMS] = table_address, ops, rows, items
    atomic_store(board, _RUN, run)
    sleepers = 0
    for thread in range(1, threads):
        if compare_and_swap(board, _place(thread, ASLEEP), 1, 0) == 1:
            board[_place(thread, WAKE)] = 1
            sleepers += 1
    return sleepers


@kernel
def lead(board_address, threads):
    """Take part, as thread 0, in the run that was begun; it is complete on return."""
    board = i64_pointer(board_address)
    _run(board, board_address, board[_RUN], board[_TABLE], board[_OPS], board[_ROWS], board[_ITEMS], 0, threads)


@kernel
def follow(board_address, thread, threads):
    """Take part in every run as `thread`, until there is something to do in Python (True) or to sleep (False)."""
    board = i64_pointer(board_address)
    idle = 0
    while True:
        run = atomic_load(board, _RUN)
        if run != board[_place(thread, SEEN)] and run % 2 == 0:
            table, ops = atomic_load(board, _TABLE), atomic_load(board, _OPS)
            rows, items = atomic_load(board, _ROWS), atomic_load(board, _ITEMS)
            if atomic_load(board, _RUN) == run:
                board[_place(thread, SEEN)] = run
                if ops == 0:
                    return True
                _run(board, board_address, run, table, ops, rows, items, thread, threads)
                idle = 0
        idle += 1
        if idle >= _IDLE_SPINS:
            atomic_store(board, _place(thread, ASLEEP), 1)
            if atomic_load(board, _RUN) == run:
                return False
            if compare_and_swap(board, _place(thread, ASLEEP), 1, 0) == 0:
                return False  # the caller has seen it and wakes this thread
            idle = 0
