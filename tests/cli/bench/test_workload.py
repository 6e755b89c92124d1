"""The workload: lengths, prefixes, arrivals, seeds, and what it refuses."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.bench.workload import Workload
from engine.errors import ConfigError


def test_prompts_have_the_lengths_asked_for_and_share_a_prefix() -> None:
    requests = Workload(num_prompts=5, input_len=5, prefix_len=7, output_len=9).requests(vocab_size=1000)
    assert [(len(r.prompt), r.output_len) for r in requests] == [(12, 9)] * 5
    assert len({tuple(r.prompt[:7]) for r in requests}) == 1
    assert len({tuple(r.prompt[7:]) for r in requests}) == 5
    assert all(0 <= t < 1000 for r in requests for t in r.prompt)


def test_there_are_as_many_prefixes_as_asked_for() -> None:
    requests = Workload(num_prompts=200, input_len=1, prefix_len=8, num_prefixes=4).requests(vocab_size=1000)
    counts: dict[tuple[int, ...], int] = {}
    for r in requests:
        counts[tuple(r.prompt[:8])] = counts.get(tuple(r.prompt[:8]), 0) + 1
    assert len(counts) == 4 and min(counts.values()) > 25


def test_a_range_of_lengths() -> None:
    """100 and 10 within a quarter: [75, 125], and [7, 13] since ends are rounded outwards."""
    requests = Workload(num_prompts=2000, input_len=100, output_len=10, range_ratio=0.25).requests(vocab_size=50)
    inputs, outputs = [len(r.prompt) for r in requests], [r.output_len for r in requests]
    assert (min(inputs), max(inputs)) == (75, 125) and np.mean(inputs) == pytest.approx(100, abs=1.5)
    assert set(outputs) == set(range(7, 14))


def test_max_len_bounds_every_request() -> None:
    workload = Workload(num_prompts=2000, input_len=3, output_len=3, range_ratio=0.9, prefix_len=4)
    assert max(len(r.prompt) + r.output_len for r in workload.requests(9)) == workload.max_len == 4 + 6 + 6


@given(seed=st.integers(0, 2**32), rate=st.floats(0.01, 1000))
def test_the_seed_decides_and_the_rate_changes_only_times(seed: int, rate: float) -> None:
    def requests(**more: Any) -> Any:
        return Workload(num_prompts=6, input_len=8, range_ratio=0.5, **more).requests(99)

    assert requests(seed=seed, request_rate=rate) == requests(seed=seed, request_rate=rate)
    assert requests(seed=seed, request_rate=rate) != requests(seed=seed + 1, request_rate=rate)
    assert [r[1:] for r in requests(seed=seed, request_rate=rate)] == [r[1:] for r in requests(seed=seed)]


@given(seed=st.integers(0, 1000), rate=st.floats(0.1, 1000))
def test_poisson_arrivals(seed: int, rate: float) -> None:
    """Mean and standard deviation of an exponential are both 1 / rate; theirs here stray by 1 / sqrt(4000)."""
    times = list(Workload(num_prompts=4001, request_rate=rate, seed=seed).arrivals())
    gaps = np.array([b - a for a, b in pairwise(times)])
    assert times[0] == 0.0 and gaps.min() >= 0
    assert gaps.mean() * rate == pytest.approx(1, abs=0.1) and gaps.std() * rate == pytest.approx(1, abs=0.2)


def test_burstiness() -> None:
    """A gamma distribution of shape b has a standard deviation of 1 / sqrt(b) of its mean."""
    for burstiness, spread in ((0.25, 2.0), (4.0, 0.5)):
        workload = Workload(num_prompts=20001, request_rate=5.0, burstiness=burstiness)
        gaps = np.diff(list(workload.arrivals()))
        assert gaps.mean() == pytest.approx(0.2, rel=0.05) and gaps.std() / gaps.mean() == pytest.approx(
            spread, rel=0.1
        )


def test_even_gaps_and_all_at_once() -> None:
    assert list(Workload(num_prompts=4, request_rate=2.0, burstiness=math.inf).arrivals()) == [0.0, 0.5, 1.0, 1.5]
    assert list(Workload(num_prompts=3).arrivals()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_prompts": 0}, "num_prompts"),
        ({"input_len": -1}, "input_len"),
        ({"input_len": 0}, "input_len"),
        ({"output_len": 0}, "output_len"),
        ({"prefix_len": -1}, "prefix_len"),
        ({"num_prefixes": 0}, "num_prefixes"),
        ({"range_ratio": 1.0}, "range_ratio"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": math.nan}, "request_rate"),
        ({"burstiness": 0.0}, "burstiness"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        Workload(**settings)
