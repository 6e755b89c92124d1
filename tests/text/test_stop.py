"""StopMatcher against a model that sees the whole text and uses str.find."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.request.params import SamplingParams
from engine.text.stop import StopMatcher


def naive_hit(text: str, stops: Sequence[str], unarmed: int = 0) -> tuple[int, str] | None:
    """(end, stop) of the match that ends first, the longest of those; ends up to `unarmed` don't count."""
    hits = [
        (start + len(stop), -len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.find(stop, start) == start and start + len(stop) > unarmed
    ]
    return (min(hits)[0], min(hits)[2]) if hits else None


def naive_held(text: str, stops: Sequence[str]) -> int:
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def check(pieces: Sequence[str], stops: Sequence[str], include_stop: bool, num_unarmed: int = 0) -> None:
    text = "".join(pieces)
    unarmed = len("".join(pieces[:num_unarmed]))
    expected = naive_hit(text, stops, unarmed)
    matcher = StopMatcher(stops, include_stop)
    emitted, seen = "", ""
    for i, piece in enumerate(pieces):
        safe, stop = matcher.push(piece, armed=i >= num_unarmed)
        emitted, seen = emitted + safe, seen + piece
        if stop is not None:
            assert expected is not None
            end, expected_stop = expected
            assert stop == expected_stop
            assert len(seen) - len(piece) < end <= len(seen)  # found as soon as it is there
            assert emitted == text[: end if include_stop else end - len(stop)]
            assert matcher.flush() == ""
            return
        assert emitted == seen[: len(seen) - naive_held(seen, stops)]  # held back: no more and no less
    assert expected is None
    assert emitted + matcher.flush() == text
    assert matcher.flush() == ""


def all_cuts(text: str) -> Iterator[list[str]]:
    for n in range(len(text)):
        for cuts in combinations(range(1, len(text)), n):
            bounds = [0, *cuts, len(text)]
            yield [text[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("ABCDEFGHIJK", ["DEFGHIJ"]),
        ("XDEFY", ["DEF"]),
        ("a stopper", ["stop"]),
        ("stable", ["stopper", "step"]),
        ("aaaab", ["aaab"]),
        ("你好世界!", ["好世"]),
        ("a👍🏽b", ["🏽"]),
        ("abcde", ["abcdef", "bcd", "cd"]),
        ("xyz", ["yz", "xyz"]),
        ("abab", ["ababc", "bac", "bb"]),
        ("", ["a"]),
    ],
)
@pytest.mark.parametrize("include_stop", [False, True])
def test_every_way_to_cut(text: str, stops: list[str], include_stop: bool) -> None:
    for pieces in all_cuts(text):
        check(pieces, stops, include_stop)


small = st.text(alphabet="ab👍", max_size=8)


@given(
    st.lists(small, max_size=12),
    st.lists(st.text(alphabet="ab👍", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.integers(0, 4),
)
def test_against_the_model(pieces: list[str], stops: list[str], include_stop: bool, num_unarmed: int) -> None:
    check(pieces, stops, include_stop, min(num_unarmed, len(pieces)))


def test_text_of_a_stop_is_not_emitted() -> None:
    matcher = StopMatcher(["DEFGHIJ"], False)
    assert [matcher.push(p) for p in ("ABCD", "EFG", "HIJK")] == [("ABC", None), ("", None), ("", "DEFGHIJ")]


def test_held_text_is_shorter_than_the_longest_stop() -> None:
    matcher = StopMatcher(["a" * 1000 + "b"], False)
    emitted = sum(len(matcher.push("a")[0]) for _ in range(20_000))
    assert emitted == 19_000
    assert matcher.flush() == "a" * 1000


@pytest.mark.parametrize("stop", ["", ["a", ""], [str(i) for i in range(10_000)], "x" * 100_000])
def test_limits(stop: str | list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        SamplingParams(stop=stop)


def test_duplicates_count_once() -> None:
    assert SamplingParams(stop=["a"] * 1000).stop_strings == ("a",)
