"""SamplingParams refuse what cannot work, by field."""

import math
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.request.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (math.nan, math.inf, -0.5, True, "1", 1.1e38, 10**400, -(10**400))],
        *[("top_p", v) for v in (math.nan, math.inf, -1.0, 0.0, 1.5)],
        *[("min_p", v) for v in (math.nan, -0.1, 1.1)],
        *[("top_k", v) for v in (-2, 1.5, 1 << 31)],
        *[("length_penalty", v) for v in (-16.5, 17, 1e308, math.nan, 10**400)],
        *[("presence_penalty", v) for v in (math.nan, math.inf, -math.inf, -2.1, 2.1)],
        *[("frequency_penalty", v) for v in (math.nan, math.inf, -math.inf, -2.1, 2.1)],
        *[("repetition_penalty", v) for v in (math.nan, math.inf, -1, 0, 1e-38, 1e39, 10**400)],
        *[("logit_bias", {5: v}) for v in (math.nan, math.inf, -math.inf, 101, -101, 10**400, "1", True)],
        *[("logit_bias", {i: 1.0}) for i in (-1, 1.0, "5", True)],
        *[("allowed_token_ids", v) for v in ([], [-1], [True])],
        *[("bad_words", v) for v in ([""], ["x" * 129], [5], ["x"] * 257)],
        *[("seed", v) for v in (-1, 1 << 63, 0.5)],
        *[("max_tokens", v) for v in (-1, 1.0)],
        *[("min_tokens", v) for v in (-1, 17)],
        *[("logprobs", v) for v in (-1, True)],
        ("prompt_logprobs", -1),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", "x" * 1025),
        ("stop", "\ud800"),
        ("bad_words", ["a\udfff"]),
        ("stop", [str(i) for i in range(65)]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(257))),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    """S01, S05, S11, R18, T15"""
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")


@pytest.mark.parametrize("field", ["n", "top_k", "temperature"])
def test_a_number_that_python_does_not_write_out_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: an integer of 16610 bits is out of range"):
        SamplingParams(**dict[str, Any]({field: -(10**5000)}))


def test_good_values_pass_and_are_normalised() -> None:
    params = SamplingParams(temperature=5e-324, top_p=1e-9, top_k=-1, seed=0, stop=["a", "b", "a"], max_tokens=None)
    assert params.stop_strings == ("a", "b")
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop_token_ids=[3, 3]).stop_ids == (3,)


@pytest.mark.parametrize(
    "given",
    [
        {"use_beam_search": True, "temperature": 0.5, "seed": 3},
        {"length_penalty": 2.0, "early_stopping": True},
        {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 3},
        {"min_tokens": 3, "ignore_eos": True},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False, "detokenize": False},
        {"n": 2, "best_of": 2},
    ],
)
def test_what_has_no_effect_together_is_taken(given: dict[str, Any]) -> None:
    """docs/sampling.md lists them; what else cannot be had together is refused."""
    assert SamplingParams(**given)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        *(({"use_beam_search": True, **each}, next(iter(each))) for each in (
            {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.5},
            {"logit_bias": {1: 1.0}}, {"bad_words": ["x"]}, {"stop": "x"}, {"min_tokens": 1}, {"logprobs": 1},
        )),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"n": 2, "max_tokens": 0}, "n"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_together_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**given)
    assert caught.value.field == field
