"""The workload: shapes, seeds, arrivals, what it refuses."""

from itertools import pairwise
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.profile.workload import Workload


def test_prompts_have_the_lengths_asked_for_and_share_a_prefix() -> None:
    prompts = list(Workload(num_prompts=5, input_len=12, shared_prefix_len=7).prompts(vocab_size=1000))
    assert [len(p) for p in prompts] == [12] * 5
    assert {tuple(p[:7]) for p in prompts} == {tuple(prompts[0][:7])}
    assert len({tuple(p[7:]) for p in prompts}) == 5
    assert all(0 <= t < 1000 for p in prompts for t in p)


def test_the_seed_decides() -> None:
    a, again, b = (Workload(seed=s, request_rate=3.0) for s in (1, 1, 2))
    assert list(a.prompts(99)) == list(again.prompts(99)) != list(b.prompts(99))
    assert list(a.arrivals()) == list(again.arrivals()) != list(b.arrivals())


def test_arrivals_have_the_rate_and_exponential_gaps() -> None:
    """Mean and standard deviation of an exponential are both 1 / rate."""
    times = list(Workload(num_prompts=4001, request_rate=10.0).arrivals())
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert (times[0], min(gaps) > 0) == (0.0, True)
    assert mean == pytest.approx(0.1, rel=0.1) and deviation == pytest.approx(0.1, rel=0.1)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert list(Workload(num_prompts=3).arrivals()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_prompts": 0}, "num_prompts"),
        ({"input_len": 0}, "input_len"),
        ({"output_len": 0}, "output_len"),
        ({"shared_prefix_len": -1}, "shared_prefix_len"),
        ({"shared_prefix_len": 129}, "shared_prefix_len"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": float("nan")}, "request_rate"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        Workload(**settings)
