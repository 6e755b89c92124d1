"""Sampling against tests/devices/sampling/reference.py and the cpu device's sampler: ids, rules, state, logprobs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.devices.cuda.ops import sampling
from engine.devices.cuda.ops.sampling import NO_HISTORY, ROW_PARAMS, SamplingState, pack_row
from engine.devices.cuda.registry import SOURCES
from engine.plan import RowState
from tests.cuda.kernels import SCHEDULES, CpuRegistry
from tests.devices.driver import GREEDY
from tests.devices.sampling import test_sampler as cpu
from tests.devices.sampling.reference import gumbel_noise, kept_tokens, log_softmax, philox_words
from tests.devices.sampling.test_rules import applied
from tests.gpu_without_gpu import executor
from tests.gpu_without_gpu.executor import poisoned

pytestmark = pytest.mark.cuda

RANDOM = replace(GREEDY, temperature=1.0)
MAX_LEN = 32


class Rows:
    """State of rows 0, 1, ... as the device keeps it; `sample` runs the kernel for some of them."""

    def __init__(self, states: list[RowState], vocab: int, registry: CpuRegistry | None = None) -> None:
        self.registry = registry or CpuRegistry()
        records, parts, start = [], [], 0
        histories = [i for i, state in enumerate(states) if state.needs_history]
        counts = np.zeros((max(len(histories), 1), vocab), np.uint32)
        history = poisoned((max(len(histories), 1), MAX_LEN), np.int32)
        for i, state in enumerate(states):
            record, part = pack_row(state, vocab)
            record["rules"] = start
            record["history"] = histories.index(i) if i in histories else NO_HISTORY
            start += len(part)
            records.append(record)
            parts.append(part)
        rules = np.concatenate([*parts, np.zeros(1, np.int32)])
        last_ids = np.full(len(states), -7, np.int32)
        self.state = SamplingState(np.concatenate(records), rules, counts, history, last_ids, vocab, MAX_LEN)
        for slot, i in enumerate(histories):
            tokens = np.array(states[i].token_ids, np.int32)
            arguments = len(tokens), states[i].prompt_len
            sampling.start_history(self.registry, self.state, slot, tokens, *arguments, stream=None)

    def sample(
        self,
        logits: NDArray[np.float32],
        rows: list[int] | None = None,
        positions: list[int] | int = 1,
        logit_rows: list[int] | None = None,
        masks: NDArray[np.uint32] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Ids and faults; the logits as the rules left them stay in `changed`."""
        rows = list(range(len(self.state.last_ids))) if rows is None else rows
        places = [positions] * len(rows) if isinstance(positions, int) else positions
        self.changed = poisoned((len(rows), self.state.vocab), np.float32)
        ids, faulted = poisoned(len(rows), np.int32), poisoned(len(rows), np.int32)
        frozen = logits.copy()
        frozen.flags.writeable = False
        sampling.sample(
            self.registry,
            self.state,
            logits=frozen,
            logit_rows=np.array(range(len(rows)) if logit_rows is None else logit_rows, np.int32),
            rows=np.array(rows, np.int32),
            positions=np.array(places, np.int32),
            masks=masks,
            changed=self.changed,
            token_ids=ids,
            faulted=faulted,
            samples=len(rows),
            stream=None,
        )
        assert set(faulted.tolist()) <= {0, 1}
        return ids.tolist(), [bool(flag) for flag in faulted]


def random_states(count: int, seed: int) -> list[RowState]:
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    return [
        replace(
            GREEDY,
            temperature=pick(0.3, 0.7, 1.0, 3.0),
            top_k=pick(0, -1, 1, 2, 5, 30, 100000),
            top_p=pick(1.0, 0.999, 0.9, 0.5, 0.01),
            min_p=pick(0.0, 0.0, 0.01, 0.2, 1.0),
            seed=int(rng.integers(1 << 63)),
            choice=int(rng.integers(6)),
        )
        for _ in range(count)
    ]


NOISE = r"""
#include "sampling/philox.cuh"
extern "C" __global__ void noise(u32* words, double* noise, float* bounds, u64 seed, u32 position, u32 choice) {
  const int quad = blockIdx.x * blockDim.x + threadIdx.x;
  const Words four = philox(seed, quad, position, choice);
  for (int i = 0; i < 4; ++i) {
    words[quad * 4 + i] = four.v[i];
    noise[quad * 4 + i] = gumbel(four.v[i]);
    bounds[quad * 4 + i] = gumbel_bound(four.v[i]);
  }
}
extern "C" __global__ void of_words(const u32* words, double* noise, float* bounds) {
  noise[threadIdx.x] = gumbel(words[threadIdx.x]);
  bounds[threadIdx.x] = gumbel_bound(words[threadIdx.x]);
}
"""


def test_counter_bits_are_the_cpus_and_noise_is_within_two_ulp() -> None:
    module = executor.compile(NOISE, (f"-I{SOURCES}", "-std=c++17"))
    words, noise, bounds = poisoned(1024, np.uint32), poisoned(1024, np.float64), poisoned(1024, np.float32)
    seed, position, choice = 0xFEDCBA9876543210, 77, 3
    arguments = np.uint64(seed), np.uint32(position), np.uint32(choice)
    module.kernel("noise").launch((4,), (64,), (words, noise, bounds, *arguments))
    key = seed & 0xFFFFFFFF, seed >> 32
    assert words.tolist() == [w for quad in range(256) for w in philox_words((quad, position, choice, 0), key)]
    expected = gumbel_noise(seed, position, choice, 1024)
    assert (np.abs(noise - expected) <= 2 * np.spacing(np.abs(expected).astype(np.float32))).all()
    assert (np.abs(noise - expected) <= 1e-13 * np.maximum(np.abs(expected), 1)).all()  # it is float64
    assert (bounds >= noise + 8e-4).all()
    assert np.median(bounds - noise) < 1.5


def test_noise_of_the_extreme_words_is_finite() -> None:
    words = np.array([0, 1, 2, 3, 1 << 31, (1 << 32) - 1], np.uint32)
    noise, bounds = poisoned(len(words), np.float64), poisoned(len(words), np.float32)
    executor.compile(NOISE, (f"-I{SOURCES}", "-std=c++17")).kernel("of_words").launch(
        (1,), (len(words),), (words, noise, bounds)
    )
    v = (words.astype(np.float64) + 0.5) / 2**32
    np.testing.assert_allclose(noise, -np.log(-np.log1p(-v)), rtol=1e-12)
    assert (bounds >= noise + 8e-4).all()


@pytest.mark.parametrize("vocab, coarse, seed", [(61, False, 0), (64, True, 1), (2050, False, 2), (2052, True, 3)])
def test_ids_are_the_references(vocab: int, coarse: bool, seed: int) -> None:
    """Gumbel-max over the filtered tokens with the documented noise; `coarse` logits are full of ties."""
    states = random_states(24, seed)
    wide = np.random.default_rng(seed).standard_normal((24, vocab)) * 3
    logits = (np.round(wide) if coarse else wide).astype(np.float32)
    positions = [1 + 5 * i for i in range(24)]
    ids, faulted = Rows(states, vocab).sample(logits, positions=positions)
    assert not any(faulted)
    for values, state, position, token in zip(logits.astype(np.float64), states, positions, ids, strict=True):
        kept = kept_tokens(values, state.temperature, state.top_k, state.top_p, state.min_p)
        noise = gumbel_noise(state.seed, position, state.choice, vocab)
        score = (values - values.max()) / state.temperature + noise
        assert token in kept
        assert score[token] > max(score[i] for i in kept) - 1e-4  # float32 logits over temperature
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice")
    rows = [{name: getattr(state, name) for name in names} for state in states]
    rows = [row | {"position": position} for row, position in zip(rows, positions, strict=True)]
    assert ids == cpu.sample(logits, rows)[0]


@pytest.mark.parametrize(
    "probabilities, options, kept",
    [
        ([0.5, 0.3, 0.15, 0.05], {"top_p": 0.6}, {0, 1}),
        ([0.5, 0.3, 0.15, 0.05], {"top_p": 0.5}, {0}),
        ([0.5, 0.3, 0.15, 0.05], {"top_p": 0.8}, {0, 1}),
        ([0.25, 0.25, 0.25, 0.25], {"top_p": 0.5}, {0, 1}),
        ([0.1, 0.4, 0.1, 0.4], {"top_p": 0.81}, {0, 1, 3}),
        ([0.25, 0.25, 0.25, 0.25], {"top_k": 2}, {0, 1}),
        ([0.4, 0.2, 0.2, 0.2], {"top_k": 3, "top_p": 0.75}, {0, 1}),
        ([0.4, 0.3, 0.2, 0.1], {"min_p": 0.6}, {0, 1}),
        ([0.25, 0.25, 0.25, 0.25], {"min_p": 1.0}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_the_smallest_set_that_reaches_the_mass(
    probabilities: list[float], options: dict[str, Any], kept: set[int]
) -> None:
    states = [replace(RANDOM, seed=seed, **options) for seed in range(60)]
    logits = np.log(np.array([probabilities], np.float32)).repeat(60, 0)
    assert set(Rows(states, 4).sample(logits)[0]) == kept


def test_greedy_ties_go_to_the_lower_id() -> None:
    logits = np.zeros((3, 1100), np.float32)
    logits[0, [700, 1099, 703]] = logits[1, [1099, 5]] = 2.0
    states = [GREEDY, replace(GREEDY, temperature=9e-6, top_p=0.5), GREEDY]
    assert Rows(states, 1100).sample(logits)[0] == [700, 5, 0]


@pytest.mark.parametrize("state", [GREEDY, RANDOM, replace(RANDOM, top_k=5, top_p=0.9)])
def test_faults_stay_in_their_row(state: RowState) -> None:
    healthy = np.random.default_rng(2).standard_normal(33).astype(np.float32)
    logits = np.stack([healthy] * 6)
    logits[1, 7] = logits[2] = np.nan
    logits[3, 0] = np.inf
    logits[4] = -np.inf
    rows = Rows([state] * 6, 33)
    ids, faulted = rows.sample(logits)
    assert faulted == [False, True, True, True, True, False]
    assert ids[0] == ids[5] == Rows([state], 33).sample(healthy[None])[0][0]
    assert ids[1:5] == [0] * 4
    assert rows.state.last_ids.tolist() == ids


def test_minus_infinity_is_never_sampled() -> None:
    logits = np.full((60, 9), -np.inf, np.float32)
    logits[:, [4, 6]] = -50.0
    states = [replace(RANDOM, seed=seed, top_p=p) for seed, p in zip(range(60), [1.0, 0.9] * 30, strict=True)]
    assert set(Rows(states, 9).sample(logits)[0]) == {4, 6}


VOCAB = 70
LOGITS = np.linspace(-4, 4, VOCAB).astype(np.float32)
MASK = np.array([[1 << 31, 0b101, 1 << 5]], np.uint32)  # ids 31, 32, 34, 69
HISTORY: dict[str, Any] = {"token_ids": (5, 5, 6, 6, 69), "prompt_len": 3}


@pytest.mark.parametrize(
    "state, masks",
    [
        ({"logit_bias": ((2, 3.0), (3, -100.0), (70, 5.0))}, None),
        ({"allowed_ids": (3, 32, 69, 69, 99)}, None),
        ({"allowed_ids": (3, 32, 69)}, MASK),
        ({}, MASK),
        ({"banned_ids": (2, 3, VOCAB), "min_position": 6}, None),
        ({"banned_ids": (2, 3), "min_position": 5}, None),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5, **HISTORY}, None),
        ({"repetition_penalty": 1.3, "logit_bias": ((5, 0.7), (69, -9.0)), **HISTORY}, None),
        ({"bad_words": ((7,), (6, 69, 8), (5, 69, 9), (6, 6, 69, 10), (1, 99)), **HISTORY}, None),
        ({"bad_words": ((5, 5, 6, 6, 69, 11), (0, 5, 5, 6, 6, 69, 12)), **HISTORY}, None),
        (
            {
                "presence_penalty": 0.3,
                "repetition_penalty": 0.7,
                "bad_words": ((69, 6),),
                "allowed_ids": tuple(range(5, 70)),
                "banned_ids": (68,),
                "min_position": 9,
                "logit_bias": ((67, 1.5), (6, 2.0)),
                **HISTORY,
            },
            np.full((1, 3), 0xFFFFFFFF, np.uint32),
        ),
    ],
)
def test_rules_change_logits_as_on_the_cpu(state: dict[str, Any], masks: NDArray[np.uint32] | None) -> None:
    """Bit by bit, in the middle row of three; the others have no rules, and under a mask stay their logits."""
    position = len(state.get("token_ids", (0,) * 5))
    full = None if masks is None else np.stack([np.full(3, 0xFFFFFFFF, np.uint32), masks[0], masks[0]])
    rows = Rows([GREEDY, replace(GREEDY, **state), GREEDY], VOCAB)
    ids, faulted = rows.sample(np.stack([LOGITS] * 3), positions=position, masks=full)
    both = None if masks is None else np.stack([masks[0], masks[0]])
    expected = applied(LOGITS, position, both, **state)
    np.testing.assert_array_equal(rows.changed[1], expected)
    assert ids[:2] == [VOCAB - 1, int(expected.argmax())]
    assert not any(faulted)


def test_penalties_by_hand() -> None:
    """Prompt [5, 5, 6], output [6]; presence 1, frequency .5 touch 6 only, repetition 2 both, whatever the count."""
    history: dict[str, Any] = {"token_ids": (5, 5, 6, 6), "prompt_len": 3}
    rows = Rows(
        [
            replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.5, **history),
            replace(GREEDY, repetition_penalty=2.0, **history),
            replace(GREEDY, repetition_penalty=2.0, **history),
        ],
        8,
    )
    rows.sample(np.array([[4.0], [4.0], [-4.0]], np.float32).repeat(8, 1), positions=4)
    assert rows.changed.tolist() == [
        [4, 4, 4, 4, 4, 4, 2.5, 4],
        [4, 4, 4, 4, 4, 2, 2, 4],
        [-4, -4, -4, -4, -4, -8, -8, -4],
    ]


def test_a_row_remembers_what_it_sampled() -> None:
    """Each id counts against itself at once, and the last one decides which bad word threatens."""
    state = replace(GREEDY, frequency_penalty=1.0, bad_words=((1, 2),), token_ids=(2,), prompt_len=1)
    rows = Rows([GREEDY, state], 5)
    logits = np.array([[0, 1.5, 3, 0, 0]], np.float32)
    taken = [rows.sample(logits, rows=[1], positions=[1 + step])[0][0] for step in range(5)]
    expected, history = [], [2]
    for _ in range(5):
        values = logits[0].copy()
        if history[-1] == 1:
            values[2] = -np.inf
        for token in set(history[1:]):
            values[token] -= history[1:].count(token)
        expected.append(int(values.argmax()))
        history.append(expected[-1])
    assert taken == expected
    assert rows.state.history[0, :6].tolist() == history
    assert rows.state.last_ids.tolist() == [-7, taken[-1]]
    assert rows.state.counts[0].tolist() == [
        expected.count(token) + (1 << 31 if token == 2 else 0) for token in range(5)
    ]


def test_choices_share_logits() -> None:
    """Three rows sample from one row of logits, each by its own stream."""
    states = [replace(RANDOM, choice=choice) for choice in range(3)]
    logits = np.zeros((2, 40), np.float32)
    logits[0, 3] = 99.0
    ids, _ = Rows(states, 40).sample(logits, positions=8, logit_rows=[1, 1, 1])
    assert ids == [int(gumbel_noise(0, 8, choice, 40).argmax()) for choice in range(3)]


def test_nothing_left_is_a_fault_and_a_fault_stays_visible_under_rules() -> None:
    logits = np.stack([LOGITS] * 3)
    logits[0, 0] = np.nan
    states = [
        replace(GREEDY, banned_ids=(0,), min_position=5),
        replace(GREEDY, allowed_ids=(1,), banned_ids=(1,), min_position=5),
        GREEDY,
    ]
    assert Rows(states, VOCAB).sample(logits) == ([0, 0, VOCAB - 1], [True, True, False])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_and_any_batch(schedule: Any) -> None:
    """A row's token is the same alone, and whatever threads do first; the race checker is on."""
    registry = CpuRegistry()
    registry.schedule = schedule
    state = replace(
        RANDOM, top_k=40, top_p=0.8, min_p=0.001, seed=9, logit_bias=((3, 1.0),), repetition_penalty=1.2, **HISTORY
    )
    logits = np.random.default_rng(5).standard_normal((3, 300)).astype(np.float32)
    states = [RANDOM, state, replace(RANDOM, top_p=0.7)]
    together = Rows(states, 300, registry).sample(logits, positions=5)[0]
    assert together == Rows(states, 300).sample(logits, positions=5)[0]
    assert Rows([state], 300, registry).sample(logits[1:2], positions=5)[0] == together[1:2]


@pytest.mark.parametrize("arch", ["compute_90", "compute_100", "compute_120"])
def test_other_architectures(arch: str) -> None:
    states, logits = random_states(6, 7), np.random.default_rng(7).standard_normal((6, 90)).astype(np.float32)
    assert Rows(states, 90, CpuRegistry(arch)).sample(logits) == Rows(states, 90).sample(logits)


def test_records_are_what_the_kernel_reads() -> None:
    assert ROW_PARAMS.itemsize == 96
    state = replace(RANDOM, seed=(1 << 64) - 1, banned_ids=(1, 1), logit_bias=((3, 0.5),), bad_words=((4, 5), (6,)))
    record, rules = pack_row(state, 10)
    assert record["seed"][0] == (1 << 64) - 1
    assert rules.tolist() == [1, 3, np.float32(0.5).view(np.int32), 2, 4, 5, 1, 6]


@pytest.mark.parametrize("vocab, k", [(41, 6), (64, 0), (50, 50), (2051, 20)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logprobs_ranks_and_alternatives(vocab: int, k: int, schedule: Any) -> None:
    registry = CpuRegistry()
    registry.schedule = schedule
    logits = np.round(np.random.default_rng(3).standard_normal((5, vocab)) * 4).astype(np.float32)  # ties
    logits[2] = np.random.default_rng(4).standard_normal(vocab) * 20
    logits[4, : vocab - 2] = -np.inf
    rows, tokens = np.array([4, 0, 1, 2, 2], np.int32), np.array([vocab - 1, 0, 5, 40, 7], np.int32)
    out = poisoned(5, np.float32), poisoned(5, np.int32), poisoned(5 * k + 1, np.int32), poisoned(5 * k + 1, np.float32)
    sampling.logprobs(
        registry, logits=logits, logit_rows=rows, tokens=tokens, out=out, requests=5, k=k, vocab=vocab, stream=None
    )
    top_ids, top_logprobs = (array[:-1].reshape(5, k) for array in out[2:])
    for i, row in enumerate(rows):
        expected = log_softmax(logits[row].astype(np.float64))
        order = sorted(range(vocab), key=lambda j: (-logits[row, j], j))
        assert top_ids[i].tolist() == order[:k]
        np.testing.assert_allclose(top_logprobs[i], expected[order[:k]], rtol=2e-6, atol=2e-7)
        np.testing.assert_allclose(out[0][i], expected[tokens[i]], rtol=2e-6, atol=2e-7)
        assert out[1][i] == order.index(tokens[i]) + 1


def test_logprobs_of_a_faulted_row_hurt_nobody() -> None:
    logits = np.random.default_rng(3).standard_normal((2, 33)).astype(np.float32)
    logits[0, 5] = np.nan
    out = (poisoned(2, np.float32), poisoned(2, np.int32), poisoned((2, 4), np.int32), poisoned((2, 4), np.float32))
    where = np.arange(2, dtype=np.int32)
    sampling.logprobs(
        CpuRegistry(), logits=logits, logit_rows=where, tokens=where, out=out, requests=2, k=4, vocab=33, stream=None
    )
    np.testing.assert_allclose(out[0][1], log_softmax(logits[1].astype(np.float64))[1], rtol=2e-6)
    assert ((out[2] >= 0) & (out[2] < 33)).all()


def test_nothing_to_do_is_no_launch() -> None:
    rows = Rows([GREEDY], 5)
    rows.sample(np.zeros((1, 5), np.float32), rows=[])
    sampling.scatter(rows.registry, np.zeros(1), np.zeros(0), np.zeros(0), 0, 1, stream=None)
    assert not rows.registry.reports
