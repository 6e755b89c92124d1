"""Streamed text against the one-shot decode of the same ids."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer, decode
from engine.text.tokenizer import TextTokenizer
from tests.text.samples import KINDS, TEXTS, byte_fallback, byte_level, metaspace

CUT = "\ufffd"


def stream(
    tokenizer: TextTokenizer, prompt: Sequence[int], output: Sequence[int], *, skip_special_tokens: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push([i]) for i in output), detokenizer.finish()]


def after_prompt(prompt: str, full: str) -> str:
    """What `full` has after `prompt`, whose end may be part of a character that `full` completes."""
    if full.startswith(prompt):
        return full[len(prompt) :]
    shared = next(i for i, (a, b) in enumerate(zip(prompt, full, strict=False)) if a != b)
    assert set(prompt[shared:]) == {CUT}
    return full[shared:]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "Hello", "你好 👍", "two "])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_deltas_concatenate_to_the_text(kind: str, prompt: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids, split = tokenizer.encode(prompt + text), len(tokenizer.encode(prompt))
    deltas = stream(tokenizer, ids[:split], ids[split:])
    full = tokenizer.decode(ids)
    assert full.strip() == (prompt + text).strip()
    assert "".join(deltas) == after_prompt(tokenizer.decode(ids[:split]), full)
    if CUT not in text:
        assert not any(CUT in d for d in deltas)


def test_emoji_with_skin_tone_comes_out_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("👍🏽")
    assert len(ids) == 8  # nothing of it is merged: one byte a token
    assert stream(tokenizer, [], ids) == ["", "", "", "👍", "", "", "", "🏽", ""]


def test_metaspace_keeps_word_separators() -> None:
    tokenizer = metaspace()
    ids = [tokenizer.encode(w, add_special_tokens=False)[0] for w in ("Hello", "world")]
    bang = tokenizer.encode("!", add_special_tokens=False)[-1]
    assert stream(tokenizer, [], [*ids, bang]) == ["Hello", " world", "!", ""]
    # The first token's space depends on the prompt: at the start of a text there is none.
    assert stream(tokenizer, ids[:1], [ids[1], bang]) == [" world", "!", ""]
    assert stream(tokenizer, [1], [ids[1], bang]) == ["world", "!", ""]


@pytest.mark.parametrize("kind", ["metaspace", "byte_fallback"])
def test_special_tokens_at_the_end_of_the_prompt_do_not_eat_the_space(kind: str) -> None:
    tokenizer = KINDS[kind]()
    hello, world = tokenizer.encode("Hello world", add_special_tokens=False)
    assert stream(tokenizer, [hello, *[2] * 20], [world]) == [" world", ""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_cut_character_is_emitted_at_the_end(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode("a 👍")[:-1]
    deltas = stream(tokenizer, [], ids)
    assert deltas[-1].startswith(CUT)
    assert "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_character_cut_between_prompt_and_output_belongs_to_the_output(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode("a 👍🏽!")
    for split in range(len(ids) - 9, len(ids)):
        text = "".join(stream(tokenizer, ids[:split], ids[split:]))
        assert text in ("👍🏽!", "🏽!", "!")
        assert text == after_prompt(tokenizer.decode(ids[:split]), "a 👍🏽!") or kind == "byte_fallback"


def test_cut_character_after_an_invalid_byte_in_the_prompt() -> None:
    tokenizer = byte_level()
    first, second, third, fourth = tokenizer.encode("👍")
    prompt = [*tokenizer.encode("a"), fourth, first, second]
    assert tokenizer.decode(prompt) == "a" + CUT + CUT
    assert stream(tokenizer, prompt, [third, fourth]) == ["", "👍", ""]


@pytest.mark.parametrize("invalid", ["continuation bytes", "cut characters"])
def test_character_after_a_long_invalid_run(invalid: str) -> None:
    tokenizer = byte_level()
    thumb = tokenizer.encode("👍")
    output = [*(thumb[3:] * 30 if invalid == "continuation bytes" else thumb[:3] * 10), *thumb, *thumb[:1]]
    deltas = stream(tokenizer, [], output)
    assert "".join(deltas) == tokenizer.decode(output)
    assert deltas[-6].count(CUT) < 3  # the run was sent as it came, but for its end


def test_long_byte_run_in_the_prompt_is_not_entered_in_the_middle() -> None:
    tokenizer = byte_fallback()
    prompt, full = tokenizer.encode("x" + "龘" * 20), tokenizer.encode("x" + "龘" * 21)
    assert stream(tokenizer, prompt, full[len(prompt) :]) == ["", "", "龘", ""]


def test_valid_characters_of_a_run_that_turns_invalid_stay() -> None:
    tokenizer = byte_fallback()
    first_byte, bang = tokenizer.encode("龘", False)[-3], tokenizer.encode("!", False)[-1]
    ascii_byte = 3 + ord("A")
    assert stream(tokenizer, [], [ascii_byte, first_byte, bang]) == ["A", "", CUT + "!", ""]
    assert tokenizer.decode([ascii_byte, first_byte, bang]) == CUT + CUT + "!"
    assert decode(tokenizer, [ascii_byte, first_byte, bang]) == "A" + CUT + "!"


@pytest.mark.parametrize("kind", KINDS)
def test_the_deltas_are_the_whole_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    pick = random.Random(7)
    pool = [
        *range(tokenizer.vocab_size),
        *tokenizer.encode("Hello two 你龘", False),
        *tokenizer.encode("龘", False) * 9,
    ]
    for _ in range(300):
        output = [pick.choice(pool) for _ in range(pick.randrange(30))]
        assert "".join(stream(tokenizer, [], output)) == decode(tokenizer, output)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_bytes_are_the_texts(kind: str, text: str) -> None:
    """Also where a token is a part of a character; a decoder may strip a space at the start."""
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text, False)
    if CUT in text or tokenizer.decode(ids).strip() != text.strip():
        return  # the sample's vocabulary does not spell it
    assert b"".join(map(tokenizer.token_bytes, ids)).strip() == text.strip().encode()
    assert all(
        tokenizer.token_bytes(i) == tokenizer.token_text(i).encode() for i in ids if CUT not in tokenizer.token_text(i)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    hello, world = tokenizer.encode("Hello world", add_special_tokens=False)[:2]
    unknown = [tokenizer.vocab_size, 10**6, 2**31]
    plain = stream(tokenizer, [hello], [world, world])
    assert "".join(stream(tokenizer, [hello, *unknown], [*unknown, world, *unknown, world, 1])) == "".join(plain)
    assert stream(tokenizer, [], unknown) == ["", "", "", ""]


def test_special_tokens_are_text_when_asked_for() -> None:
    tokenizer = byte_level()
    (hi,) = tokenizer.encode("a")
    assert stream(tokenizer, [], [hi, 0, hi], skip_special_tokens=False) == ["a", "<|end|>", "a", ""]
    assert stream(tokenizer, [], [hi, 0, hi]) == ["a", "", "a", ""]


byte_level_ids = st.lists(
    st.one_of(st.integers(0, byte_level().vocab_size + 3), st.sampled_from(byte_level().encode("你👍čé\ufffd"))),
    max_size=40,
)


@given(byte_level_ids, byte_level_ids, st.booleans())
def test_any_ids_byte_level(prompt: list[int], output: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    deltas = stream(tokenizer, prompt, output, skip_special_tokens=skip)
    full = tokenizer.decode([*prompt, *output], skip)
    expected = after_prompt(tokenizer.decode(prompt, skip), full)
    assert "".join(deltas) == expected
    # Pushing all ids at once is the same.
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    assert detokenizer.push(output) + detokenizer.finish() == expected


@given(
    st.text(alphabet=st.one_of(st.sampled_from("aH 你龘👍🏽č\n"), st.characters(exclude_categories=["Cs"]))), st.data()
)
def test_any_text_byte_fallback(text: str, data: st.DataObject) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text, add_special_tokens=False)
    full = tokenizer.decode(ids)
    for split in {0, data.draw(st.integers(0, len(ids)))}:
        deltas = stream(tokenizer, ids[:split], ids[split:])
        prompt = tokenizer.decode(ids[:split])
        if CUT not in prompt:
            assert "".join(deltas) == full[len(prompt) :]
        assert full.endswith("".join(deltas))


class CountingTokenizer(TextTokenizer):
    """Counts the ids that incremental text decodes or looks at."""

    def __init__(self, inner: TextTokenizer) -> None:
        self.__dict__.update(inner.__dict__)
        self.longest = 0
        self.looks = 0

    def decode_window(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(token_ids))
        return super().decode_window(token_ids, skip_special_tokens)

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        self.looks += 1
        return super().is_visible(token_id, skip_special_tokens)


@pytest.mark.parametrize(
    "make_output",
    [
        pytest.param(lambda t: t.encode(" Streaming text 你好" * 200), id="text"),
        pytest.param(lambda t: t.encode("é")[-1:] * 3000, id="continuation bytes"),
        pytest.param(lambda t: t.encode("👍")[:3] * 1000, id="cut characters"),
        pytest.param(lambda t: t.encode("\ufffd") * 1000, id="replacement marks"),
        pytest.param(lambda t: [0, 10**6] * 1500, id="no text"),
    ],
)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_cost_of_a_token_does_not_grow(kind: str, make_output) -> None:  # type: ignore[no-untyped-def]
    tokenizer = CountingTokenizer(KINDS[kind]())
    output = make_output(tokenizer)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("Hello world " * 5000), skip_special_tokens=True)
    assert tokenizer.looks <= 4
    for i in output:
        detokenizer.push([i])
    assert tokenizer.longest <= 24
