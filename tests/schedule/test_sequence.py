"""What a sequence knows, and what of it is left to compute, while steps are in flight."""

from typing import Any

import pytest

from engine.grammar.grammar import Grammar
from engine.plan import RowState
from engine.request.params import SamplingParams
from engine.schedule.sequence import Sequence, Status


class Ended(Grammar):
    def __init__(self) -> None:
        self.has_ended = True


def sequence(max_output: int = 3, **params: Any) -> Sequence:
    """Three prompt tokens."""
    return Sequence("r", [1, 2, 3], SamplingParams(**params), max_output=max_output, seed=0)


def launched(s: Sequence, *, sampling: int = 0, others: int = 0, scheduled: int = 0) -> Sequence:
    s.in_flight, s.in_flight_unsampled, s.num_scheduled = sampling + others, others, scheduled
    return s


def test_tokens_that_are_sampled_in_flight_are_known() -> None:
    s = launched(sequence(), sampling=2, others=1)
    assert (s.num_placeholders, s.known, s.num_output) == (2, 5, 0)
    s.token_ids.append(9)
    assert (s.known, s.num_output) == (6, 1)


@pytest.mark.parametrize(
    ("params", "state", "pending"),
    [
        ({}, {}, 3),
        ({}, {"scheduled": 2, "others": 1}, 1),
        ({}, {"scheduled": 3, "sampling": 1}, 1),  # as one that was preempted, with its token still in flight
        ({}, {"scheduled": 0, "sampling": 2}, 5),
        ({}, {"scheduled": 0, "sampling": 3}, 0),  # nothing more is wanted
        ({"max_output": 0}, {"scheduled": 1}, 2),
        ({"use_beam_search": True}, {"scheduled": 1}, 2),
        ({"use_beam_search": True}, {"scheduled": 3, "sampling": 1}, 0),
        ({"use_beam_search": True}, {"scheduled": 1, "others": 1}, 2),
    ],
)
def test_what_could_be_computed_now(params: dict[str, Any], state: dict[str, int], pending: int) -> None:
    assert launched(sequence(**params), **state).pending == pending


def test_a_row_that_decodes_has_its_last_token_pending_until_the_end() -> None:
    s = launched(sequence(), sampling=1, scheduled=3)
    s.is_decoding = True
    assert s.pending == 1
    s.num_scheduled = 4
    assert s.pending == 1
    s.num_scheduled = 5
    assert s.pending == 0, "the sixth token is the last, and never computed"


def test_choices_that_are_still_to_fork() -> None:
    first, *others = (sequence() for _ in range(3))
    first.forks = tuple(others)
    assert first.pending_forks() == others
    others[0].status = Status.FINISHED
    assert first.pending_forks() == others[1:]


def test_what_the_device_is_told() -> None:
    s = sequence(
        9, temperature=0.5, top_k=7, top_p=0.8, min_p=0.1, min_tokens=4, stop_token_ids=[8, 6], logprobs=2,
        prompt_logprobs=3, logit_bias={5: -1.5}, allowed_token_ids=[4, 5], presence_penalty=0.25,
    )  # fmt: skip
    s.row = 2
    assert s.row_state() == RowState(
        row=2, temperature=0.5, top_k=7, top_p=0.8, min_p=0.1, seed=0, choice=0, banned_ids=(6, 8), min_position=3 + 4,
        num_logprobs=2, num_prompt_logprobs=3, presence_penalty=0.25, frequency_penalty=0.0, repetition_penalty=1.0,
        logit_bias=((5, -1.5),), allowed_ids=(4, 5), bad_words=(), token_ids=(1, 2, 3), prompt_len=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        ({}, "top_k", 0),
        ({"top_k": -1}, "top_k", 0),
        ({"min_tokens": 2}, "banned_ids", (77,)),
        ({}, "banned_ids", ()),
        ({"min_tokens": 2, "ignore_eos": True}, "banned_ids", ()),
        ({"min_tokens": 5, "max_tokens": None}, "min_position", 3 + 4),  # no more than there may be
        ({}, "num_prompt_logprobs", -1),
        ({"prompt_logprobs": 0}, "num_prompt_logprobs", 0),
        ({}, "num_logprobs", -1),
        ({"logprobs": 0}, "num_logprobs", 0),
        ({"best_of": 2}, "num_logprobs", 0),  # to rank them
        ({"n": 3, "use_beam_search": True}, "num_logprobs", 6),
        ({"frequency_penalty": 0.5}, "token_ids", (1, 2, 3)),
        ({}, "token_ids", ()),
    ],
)
def test_what_the_device_is_told_of_defaults_and_extremes(params: dict[str, Any], field: str, value: object) -> None:
    s = Sequence("r", [1, 2, 3], SamplingParams(**params), max_output=4, seed=0, eos_token_ids=(77,))
    assert getattr(s.row_state(), field) == value


@pytest.mark.parametrize(
    ("params", "outputs", "finish"),
    [
        ({}, [5], None),
        ({}, [77], ("stop", None)),
        ({"ignore_eos": True}, [77], None),
        ({"stop_token_ids": [8]}, [8], ("stop", 8)),
        ({"stop_token_ids": [77]}, [77], ("stop", None)),
        ({}, [5, 5], ("length", None)),
        ({}, [5, 77], ("stop", None)),
    ],
)
def test_why_a_sequence_ends(params: dict[str, Any], outputs: list[int], finish: tuple[str, object] | None) -> None:
    s = Sequence("r", [1, 2, 3], SamplingParams(**params), max_output=2, seed=0, eos_token_ids=(77,))
    s.token_ids += outputs
    assert s.end_of(outputs[-1]) == finish


def test_a_grammar_that_has_ended_ends_with_the_token_that_comes() -> None:
    s = sequence(9)
    s.grammar = Ended()
    s.token_ids.append(5)
    assert s.end_of(5) == ("stop", None)
    s.end_with_next()
    assert s.max_len == 5
