"""Special tokens, ids without text, texts that are none."""

import sys
import threading

import pytest
from tokenizers import Tokenizer

from engine.errors import InvalidRequest
from engine.text.tokenizer import TextTokenizer
from tests.text.samples import KINDS, byte_level, metaspace


def test_rendered_chat_has_exactly_one_bos() -> None:
    tokenizer = metaspace()
    assert tokenizer.bos_id == 1
    with_bos = tokenizer.encode_rendered("<s>Hello")
    assert with_bos.count(1) == 1
    assert with_bos[0] == 1
    assert tokenizer.encode_rendered("Hello") == tokenizer.encode("Hello")
    assert tokenizer.encode_rendered("Hello").count(1) == 1


def test_raw_text_gets_a_bos_even_if_it_has_one_unless_switched_off() -> None:
    tokenizer = metaspace()
    assert tokenizer.encode("<s>Hello")[:2] == [1, 1]
    assert tokenizer.encode("<s>Hello", add_special_tokens=False).count(1) == 1
    assert 1 not in tokenizer.encode("Hello", add_special_tokens=False)


def test_tokenizer_without_bos_adds_none() -> None:
    tokenizer = byte_level()
    assert tokenizer.bos_id is None
    assert tokenizer.encode_rendered("Hello") == tokenizer.encode("Hello") == tokenizer.encode("Hello", False)


def test_truncation_saved_in_the_file_is_ignored() -> None:
    inner = Tokenizer.from_str(byte_level()._tokenizer.to_str())
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    assert TextTokenizer(inner).encode("Hello world " * 50) == byte_level().encode("Hello world " * 50)


@pytest.mark.parametrize("text", ["a\ud800b", 5, None, b"bytes"])
def test_what_is_no_text_is_refused(text: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        byte_level().encode(text)  # type: ignore[arg-type]


def test_a_lone_surrogate_is_refused_by_the_callers_field() -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: "):
        byte_level().encode_rendered("a\ud800")
    with pytest.raises(InvalidRequest, match=r"^bad_words: "):
        byte_level().encode("a\ud800", field="bad_words")


@pytest.mark.parametrize("call", ["encode", "decode"])
def test_long_texts_leave_other_threads_running(call: str) -> None:
    """Python's own switches are put off, so that the other thread gets its turn only where the GIL is given up."""
    tokenizer = byte_level()
    work = {"encode": lambda: tokenizer.encode("Hello " * 5000), "decode": lambda: tokenizer.decode([5] * 20_000)}[call]
    go, ran, interval = threading.Event(), list[bool](), sys.getswitchinterval()
    other = threading.Thread(target=lambda: ran.append(go.wait()))
    other.start()
    sys.setswitchinterval(1000)
    try:
        go.set()
        for _ in range(50):
            if not ran:
                work()
        assert ran
    finally:
        sys.setswitchinterval(interval)
        other.join()


def test_no_token_is_longer_than_the_longest() -> None:
    tokenizer = byte_level()
    texts = [tokenizer.token_text(i) for i in range(tokenizer.vocab_size)]
    assert tokenizer.longest_token >= max(map(len, texts)) > 1


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_what_is_no_id_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token_ids: {token_id}"):
        byte_level().decode([token_id])


@pytest.mark.parametrize("kind", KINDS)
def test_token_text_keeps_the_space(kind: str) -> None:
    tokenizer = KINDS[kind]()
    world = tokenizer.encode("Hello world", add_special_tokens=False)[-1]
    assert tokenizer.token_text(world).endswith("world"[-2:])
    assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""


def test_token_text_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TextTokenizer(Tokenizer.from_str(byte_level().to_json()))
    (a,) = tokenizer.encode("a")
    assert tokenizer.token_text(a) == "a"
    monkeypatch.setattr(tokenizer, "decode", None)
    assert tokenizer.token_text(a) == "a"


def test_token_text_of_special_and_cut_tokens() -> None:
    tokenizer = byte_level()
    assert tokenizer.token_text(0) == "<|end|>"
    assert tokenizer.token_text(tokenizer.encode("👍")[0]) == "\ufffd"
    assert metaspace().token_text(metaspace().encode("Hello world")[-1]) == " world"


def test_vocab_size_counts_added_tokens() -> None:
    inner = Tokenizer.from_str(byte_level()._tokenizer.to_str())
    inner.add_special_tokens(["<|new|>"])
    assert TextTokenizer(inner).vocab_size == byte_level().vocab_size + 1
