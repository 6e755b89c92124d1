"""Ids in, text cut at stop strings out."""

from collections.abc import Sequence

import pytest

from engine.request.params import SamplingParams
from engine.text.pipeline import TextPipeline
from engine.text.tokenizer import TextTokenizer
from tests.text.samples import byte_fallback, byte_level


def run(
    ids: Sequence[int], params: SamplingParams, tokenizer: TextTokenizer, prompt: Sequence[int] = ()
) -> tuple[list[str], str | None, int]:
    """Texts of the pushes (with the finish), the stop string, and the number of ids used."""
    pipeline = TextPipeline(tokenizer, prompt, params)
    texts = []
    for used, i in enumerate(ids, 1):
        text, stop = pipeline.push(i)
        texts.append(text)
        if stop is not None:
            return texts, stop, used
    return [*texts, pipeline.finish()], None, len(ids)


def single_bytes(text: str) -> list[int]:
    """The text as byte tokens of the byte fallback tokenizer, which come after its 3 special ones."""
    return [3 + byte for byte in text.encode()]


def test_multi_byte_stop_split_in_bytes() -> None:
    texts, stop, used = run(single_bytes("ano řekl 👍🏽 konec"), SamplingParams(stop="řekl 👍🏽"), byte_fallback())
    assert "".join(texts) == "ano "
    assert stop == "řekl 👍🏽"
    assert used == len("ano řekl 👍🏽".encode())


@pytest.mark.parametrize(
    ("include", "expected"), [(False, "The quick "), (True, "The quick brown")], ids=["exclude", "include"]
)
def test_stop_over_tokens(include: bool, expected: str) -> None:
    tokenizer = byte_level()
    ids = [i for c in "The quick brown fox" for i in tokenizer.encode(c)]
    texts, stop, used = run(ids, SamplingParams(stop="brown", include_stop_str_in_output=include), tokenizer)
    assert ("".join(texts), stop, used) == (expected, "brown", len("The quick brown"))
    if not include:
        assert not any("b" in t for t in texts)


def test_stop_inside_one_token() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("Streaming text")
    whole = next(n for n, i in enumerate(ids) if "ream" in tokenizer.token_text(i))
    texts, stop, used = run(ids, SamplingParams(stop="ream"), tokenizer)
    assert ("".join(texts), stop, used) == ("St", "ream", whole + 1)


def test_longer_word_that_begins_with_the_stop_also_stops() -> None:
    texts, stop, _ = run(single_bytes("a stopper"), SamplingParams(stop="stop"), byte_fallback())
    assert ("".join(texts), stop) == ("a ", "stop")


def test_stop_string_in_the_prompt_does_not_count() -> None:
    prompt, output = single_bytes("the en"), single_bytes("d.")
    texts, stop, _ = run(output, SamplingParams(stop=["end", "the"]), byte_fallback(), prompt)
    assert ("".join(texts), stop) == ("d.", None)


def test_everything_held_comes_out_at_the_finish() -> None:
    ids = [*single_bytes("a sto"), single_bytes("č")[0]]
    texts, stop, _ = run(ids, SamplingParams(stop="stop"), byte_fallback())
    assert stop is None
    assert texts[-1].startswith("sto")
    assert "".join(texts) == "a sto\ufffd"


@pytest.mark.parametrize(
    ("min_tokens", "text", "used"),
    [(0, "a", 3), (2, "a", 3), (3, "abc a", 7), (6, "abc a", 7), (7, "abc abc.", 8)],
    ids=["off", "ends after", "ends with the last", "second ends after", "never"],
)
def test_stop_string_that_ends_within_min_tokens_is_text(min_tokens: int, text: str, used: int) -> None:
    params = SamplingParams(stop="bc", min_tokens=min_tokens)
    texts, _, found_used = run(single_bytes("abc abc."), params, byte_fallback())
    assert ("".join(texts), found_used) == (text, used)
