"""A team: who doesn't come is not waited for, who has nothing to do sleeps, two threads don't share a processor."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.devices.cpu.kernels import teamwork
from engine.devices.cpu.kernels.simd import i64_pointer
from engine.devices.cpu.kernels.teamwork import ASLEEP, PROCESSOR, WAKE, begin, board_words, follow, place
from engine.devices.cpu.team import Team
from tests.devices.driver import GREEDY, TINY, Driver, LoudWeights, open_executor

PROMPT = np.random.default_rng(3).integers(0, TINY.vocab_size, 40).tolist()


def outcome(threads: int) -> tuple[list[int], Any]:
    with open_executor(TINY, LoudWeights(TINY), threads=threads) as executor:
        driver = Driver(executor)
        driver.add(0, PROMPT, GREEDY)
        row = driver.run(0, 16, 6)
        return row.sampled, np.stack([row.logits[i] for i in sorted(row.logits)])


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Helpers that sit out until their team is closed."""
    come, work, close = threading.Event(), Team._help, Team.close

    def work_late(self: Team, index: int) -> None:
        come.wait()
        work(self, index)

    def close_all(self: Team) -> None:
        come.set()
        close(self)

    monkeypatch.setattr(Team, "_help", work_late)
    monkeypatch.setattr(Team, "close", close_all)
    yield
    come.set()


def test_steps_do_not_wait_for_helpers_that_never_come(absent: None) -> None:
    ids, logits = outcome(3)
    alone_ids, alone_logits = outcome(1)
    assert ids == alone_ids and np.array_equal(logits, alone_logits)


def test_a_helper_without_work_goes_to_sleep_and_is_woken_once() -> None:
    board = np.zeros(board_words(2, 0), np.int64)
    address = board.ctypes.data
    assert begin(address, 0, 0, 0, 0, 2) == 0, "nobody sleeps yet"
    assert follow(address, 1, 2) is True, "a run without ops is for Python"
    assert follow(address, 1, 2) is False
    assert board[place(1, ASLEEP)] == 1
    assert begin(address, 0, 0, 0, 0, 2) == 1
    assert (board[place(1, ASLEEP)], board[place(1, WAKE)]) == (0, 1)
    assert begin(address, 0, 0, 0, 0, 2) == 0


def test_run_calls_every_thread_and_raises_what_one_raised() -> None:
    def note(fails: int, index: int, size: int) -> None:
        seen.append((index, size))
        if index == fails:
            raise ValueError("thread 2")

    seen: list[tuple[int, int]] = []
    team = Team(3, 0)
    try:
        team.run(3, note, -1)
        assert sorted(seen) == [(0, 3), (1, 3), (2, 3)]
        with pytest.raises(ValueError, match="thread 2"):
            team.run(3, note, 2)
        seen.clear()
        team.run(1, note, -1)
        assert seen == [(0, 1)]
    finally:
        team.close()


@pytest.fixture
def move() -> Iterator[Callable[[int], int]]:
    """Have thread 0 of two move away, the other being on the given processor; where thread 0 is then."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("only Linux says on which processor a thread is")
    inner: Any = numba.njit(lambda address: teamwork.move_away(i64_pointer(address), address, 0, 2))
    board = np.zeros(board_words(2, 0), np.int64)
    allowed = os.sched_getaffinity(0)

    def moved(other: int) -> int:
        board[place(1, PROCESSOR)] = other
        inner(board.ctypes.data)
        return int(board[place(0, PROCESSOR)])

    yield moved
    os.sched_setaffinity(0, allowed)


def test_a_thread_leaves_a_processor_that_another_was_last_on(move: Callable[[int], int]) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two processors")
    here, there = sorted(allowed)[:2]
    os.sched_setaffinity(0, {here})
    assert move(here) == here, "nowhere else to go"
    os.sched_setaffinity(0, {here, there})
    assert move(here) == there
    assert os.sched_getaffinity(0) == {here, there}


@numba.njit
def _take(address, tag, parts, threads, done):  # type: ignore[no-untyped-def]
    return teamwork._take(i64_pointer(address), 0, tag, parts, threads, done)


@given(parts=st.integers(0, 6000), threads=st.integers(1, 70), turns=st.lists(st.integers(0, 69), max_size=60))
def test_every_part_is_taken_once_and_counted_once(parts: int, threads: int, turns: list[int]) -> None:
    """Threads come in any order; who comes late finds nothing left, or a later run, in which it must take nothing."""
    tag, word = 5, np.array([5 << 32], np.int64)
    held = [range(0)] * threads
    taken: list[range] = []

    def come(thread: int) -> None:
        held[thread] = range(*_take(word.ctypes.data, tag, parts, threads, len(held[thread])))
        taken.append(held[thread])

    for turn in turns:
        come(turn % threads)
    for thread in range(threads):
        come(thread)
        while held[thread]:
            come(thread)
    sizes = [len(run) for run in taken if run]
    assert [part for run in taken for part in run] == list(range(parts))
    assert sizes == sorted(sizes, reverse=True) and all(2 * threads * (size - 1) < parts for size in sizes)
    assert word[0] == tag << 32 | parts << 16 | parts
    word[0] = later = (tag + 1) << 32
    assert not range(*_take(word.ctypes.data, tag, parts, threads, 3)) and word[0] == later
