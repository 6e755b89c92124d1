"""The numbers of a load: worked out by hand, and against NumPy's definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.bench.goodput import parse_objectives
from engine.cli.bench.load import Answer, Run
from engine.cli.bench.metrics import Latency, latency, make_metrics
from engine.errors import ConfigError


def answer(sent: float, times: list[float], tokens: int, *, prompt: int = 10, error: str = "") -> Answer:
    ended = times[-1] if times else sent
    return Answer(lambda: 0.0, sent, prompt, sent=sent, times=times, ended=ended, output_tokens=tokens, error=error)


# A: 5 tokens in 3 messages; TTFT 1, gaps 1 and 2, E2EL 4, TPOT (4 - 1) / 4.
# B: a single token at once after 0.5 s. C: failed after its first message.
ANSWERS = [
    answer(100.0, [101.0, 102.0, 104.0], 5),
    answer(102.0, [102.5], 1, prompt=20),
    answer(103.0, [103.5], 1, error="gone"),
]
RUN = Run(100.0, 110.0, ANSWERS, [0.0, 0.02], 3)


def test_a_run_worked_out_by_hand() -> None:
    m = make_metrics(RUN, {})
    assert (m.duration, m.completed, m.failed, m.errors) == (10.0, 2, 1, {"gone": 1})
    assert (m.total_input_tokens, m.total_output_tokens) == (30, 6)
    assert (m.request_throughput, m.output_throughput, m.total_token_throughput) == (0.2, 0.6, 3.6)
    assert m.values == {"ttft": [1.0, 0.5], "tpot": [0.75], "itl": [1.0, 2.0], "e2el": [4.0, 0.5]}
    assert m.latencies["ttft"].mean == 0.75 and m.latencies["itl"].median == 1.5
    assert m.max_concurrent_requests == 2
    assert m.lateness == pytest.approx(0.0198)
    assert m.request_goodput is None


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        (["ttft:1000"], 2),
        (["ttft:999"], 1),
        (["tpot:700"], 1),  # B has no second token to be late
        (["ttft:600", "tpot:750"], 1),
        (["e2el:499"], 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(objectives: list[str], good: int) -> None:
    assert make_metrics(RUN, parse_objectives(objectives)).request_goodput == good / 10


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:fast", "itl:5", "tpot:-1", "tpot:nan", "200"])
def test_bad_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^goodput: "):
        parse_objectives([text])


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_statistics_are_numpys(values: list[float]) -> None:
    expected = (
        np.mean(values),
        np.median(values),
        np.std(values),
        np.percentile(values, 90),
        np.percentile(values, 99),
    )
    assert latency(values) == pytest.approx(expected)


def test_nothing_gives_zeros() -> None:
    m = make_metrics(Run(1.0, 1.0, [answer(1.0, [], 0, error="refused")], [], 1), {"ttft": 1.0})
    assert m.latencies["e2el"] == Latency(0.0, 0.0, 0.0, 0.0, 0.0)
    assert (m.completed, m.failed, m.output_throughput, m.request_goodput, m.lateness) == (0, 1, 0.0, 0.0, 0.0)


def test_the_names_are_vllms() -> None:
    """Those of the file that `vllm bench serve --save-result` writes, as far as they are measured here."""
    numbers = make_metrics(RUN, {"ttft": 1.0}).as_dict()
    latencies = {f"{s}_{n}_ms" for s in ("mean", "median", "std", "p99") for n in ("ttft", "tpot", "itl", "e2el")}
    assert numbers.keys() >= latencies | {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests",
    }  # fmt: skip
    assert (numbers["median_ttft_ms"], numbers["mean_e2el_ms"]) == (750.0, 2250.0)
