"""What the /commands do to a conversation."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.chat.conversation import Conversation, Quit

SYSTEM = {"role": "system", "content": "S"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def talked(*turns: str, system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    for turn in turns:
        conversation.answer(turn, turn.upper())
    return conversation


def test_a_turn_sends_everything_before_it() -> None:
    conversation = talked("a", system="S")
    assert conversation.ask("b") == [SYSTEM, user("a"), assistant("A"), user("b")]
    assert conversation.messages == [SYSTEM, user("a"), assistant("A")]
    conversation.answer("b", "B")
    assert conversation.messages == [SYSTEM, user("a"), assistant("A"), user("b"), assistant("B")]


def test_a_question_without_an_answer_is_forgotten() -> None:
    conversation = talked("a")
    conversation.answer("b", "")
    assert conversation.messages == [user("a"), assistant("A")]


def test_reset_keeps_the_system_message() -> None:
    conversation = talked("a", "b", system="S")
    assert conversation.command("/reset") == "forgotten, but for the system message"
    assert conversation.messages == [SYSTEM]
    bare = talked("a")
    assert bare.command(" /reset ") == "forgotten"
    assert bare.messages == []


def test_system_sets_replaces_and_removes() -> None:
    conversation = talked("a")
    assert conversation.command("/system S") == "system message set"
    assert conversation.messages == [SYSTEM, user("a"), assistant("A")]
    conversation.command("/system two words\nand a line")
    assert conversation.messages[0]["content"] == "two words\nand a line"
    assert conversation.command("/system") == "system message removed"
    assert conversation.messages == [user("a"), assistant("A")]


def test_undo_goes_back_turn_by_turn_and_stops_at_the_system_message() -> None:
    conversation = talked("a", "b", system="S")
    assert conversation.command("/undo") == "undone: b"
    assert conversation.command("/undo") == "undone: a"
    assert conversation.command("/undo") == "nothing to undo"
    assert conversation.messages == [SYSTEM]


def test_save(tmp_path: Path) -> None:
    conversation = talked("přítel", system="S")
    path = tmp_path / "a b.json"
    assert conversation.command(f"/save {path}") == f"saved 3 messages to {path}"
    assert json.loads(path.read_text(encoding="utf-8")) == conversation.messages
    assert "přítel" in path.read_text(encoding="utf-8")
    assert conversation.command("/save") == "/save needs a FILE"
    assert conversation.command("/save /no/such/folder/x") == (
        "cannot save to /no/such/folder/x: No such file or directory"
    )


def test_help_lists_every_command() -> None:
    said = Conversation().command("/help")
    assert said is not None
    assert {line.split()[0] for line in said.splitlines()} == {"/reset", "/system", "/undo", "/save", "/help", "/quit"}


def test_quit() -> None:
    with pytest.raises(Quit):
        Conversation().command("/quit")


def test_an_unknown_command_is_not_sent_to_the_model() -> None:
    assert Conversation().command("/rest") == "there is no /rest; /help lists the commands"


@pytest.mark.parametrize("line", ["hello", "/etc/hosts is what?", "/", "a /reset", "//x", "/42", ""])
def test_what_is_no_command(line: str) -> None:
    assert Conversation().command(line) is None


STEPS = st.lists(
    st.one_of(
        st.sampled_from(["/undo", "/reset", "/system", "/system S"]),
        st.tuples(st.sampled_from("abc"), st.sampled_from(["", "X", "Y"])),
    )
)


@given(STEPS)
def test_speakers_alternate_whatever_happens(steps: list[str | tuple[str, str]]) -> None:
    conversation = Conversation()
    for step in steps:
        if isinstance(step, str):
            conversation.command(step)
        else:
            conversation.answer(*step)
    roles = [m["role"] for m in conversation.messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    assert turns == ["user", "assistant"] * (len(turns) // 2)
