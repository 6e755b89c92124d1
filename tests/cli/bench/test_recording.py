"""Recorded arrivals: exactly what the file says."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.bench.recording import Arrival, read_recording, recorded_requests
from engine.errors import ConfigError

ROWS = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 500), st.sampled_from([None, "a", "b"]),
              st.floats(0, 1)),
    min_size=1, max_size=20,
)  # fmt: skip


@given(ROWS)
def test_times_lengths_and_prefixes_are_those_of_the_file(rows: list[tuple[int, int, int, str | None, float]]) -> None:
    arrivals = [
        Arrival(ms / 1000, n, out, name, 0 if name is None else int(part * n)) for ms, n, out, name, part in rows
    ]
    lines = [json.dumps({k: v for k, v in a._asdict().items() if a.prefix_id or "prefix" not in k}) for a in arrivals]
    read = read_recording(lines)
    in_order = sorted(arrivals, key=lambda a: a.seconds)
    assert read == in_order
    requests = recorded_requests(read, vocab_size=10**6, seed=3)
    assert [(r.at, len(r.prompt), r.output_len) for r in requests] == [
        (a.seconds - in_order[0].seconds, a.input_len, a.output_len) for a in in_order
    ]
    for a, r in zip(in_order, requests, strict=True):
        for b, other in zip(in_order, requests, strict=True):
            shared = min(a.prefix_len, b.prefix_len)
            if a.prefix_id == b.prefix_id:
                assert r.prompt[:shared] == other.prompt[:shared]
            elif shared >= 4:
                assert r.prompt[:shared] != other.prompt[:shared]
    assert requests == recorded_requests(read, vocab_size=10**6, seed=3)


def test_the_limit_takes_the_earliest() -> None:
    lines = [json.dumps({"seconds": s, "input_len": 1, "output_len": 1}) for s in (3, 1, 2)] + ["\n"]
    assert [a.seconds for a in read_recording(lines, 2)] == [1, 2]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is not an object"),
        ('{"seconds": -1, "input_len": 1, "output_len": 1}', "line 1: seconds"),
        ('{"seconds": NaN, "input_len": 1, "output_len": 1}', "line 1: seconds"),
        ('{"seconds": 0, "output_len": 1}', "line 1: input_len"),
        ('{"seconds": 0, "input_len": 1.5, "output_len": 1}', "line 1: input_len"),
        ('{"seconds": 0, "input_len": 1, "output_len": 0}', "line 1: output_len"),
        ('{"seconds": 0, "input_len": 1, "output_len": true}', "line 1: output_len"),
        ('{"seconds": 0, "input_len": 1, "output_len": 1, "prefix_id": "a"}', "prefix_len go together"),
        ('{"seconds": 0, "input_len": 1, "output_len": 1, "prefix_id": "a", "prefix_len": 2}', "more than input_len 1"),
        ('{"seconds": 0, "input_len": 1, "output_len": 1, "priority": 1}', "no such field: priority"),
        ("", "no arrivals"),
    ],
)
def test_bad_lines_are_refused(line: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^trace: .*{says}"):
        read_recording([line])
