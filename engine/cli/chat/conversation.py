"""Conversation: the messages of a chat session and the /commands that change them; no I/O but saving.

Invariant: after the system message, if there is one, users and assistant alternate, and between two turns the
assistant spoke last. So the next prompt begins with the last one and its answer, and the prefix cache serves it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
"""A path such as /etc/hosts is no command."""


class Quit(Exception):
    """The user wants to leave."""


class Conversation:
    """Starts empty, or with a system message."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        if system:
            self._set_system(system)

    def ask(self, text: str) -> list[dict[str, str]]:
        """The messages to send for the user's next turn; `answer` makes them part of the conversation."""
        return [*self.messages, {"role": "user", "content": text}]

    def answer(self, question: str, text: str) -> None:
        """Take in a question and its answer, which may have been cut short; without any, both are forgotten."""
        if text:
            self.messages = [*self.ask(question), {"role": "assistant", "content": text}]

    def command(self, line: str) -> str | None:
        """Run a line such as `/undo` and return what to tell the user; None if it is no command. Raises Quit."""
        match = _COMMAND.fullmatch(line.strip())
        if match is None:
            return None
        name, argument = match[1], (match[2] or "").strip()
        if name not in self._COMMANDS:
            return f"there is no /{name}; /help lists the commands"
        return self._COMMANDS[name](self, argument)

    def _system_messages(self) -> list[dict[str, str]]:
        return [m for m in self.messages[:1] if m["role"] == "system"]

    def _set_system(self, text: str) -> None:
        turns = self.messages[len(self._system_messages()) :]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *turns]

    def _reset(self, _: str) -> str:
        self.messages = self._system_messages()
        return "forgotten" if not self.messages else "forgotten, but for the system message"

    def _system(self, text: str) -> str:
        self._set_system(text)
        return "system message set" if text else "system message removed"

    def _undo(self, _: str) -> str:
        if len(self.messages) - len(self._system_messages()) < 2:
            return "nothing to undo"
        self.messages, (question, _answer) = self.messages[:-2], self.messages[-2:]
        return f"undone: {question['content']}"

    def _save(self, path: str) -> str:
        if not path:
            return "/save needs a FILE"
        try:
            text = json.dumps(self.messages, ensure_ascii=False, indent=2)
            Path(path).expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            return f"cannot save to {path}: {error.strerror}"
        return f"saved {len(self.messages)} messages to {path}"

    def _help(self, _: str) -> str:
        return (
            "/reset        forget the conversation, keep the system message\n"
            "/system TEXT  set the system message; without TEXT remove it\n"
            "/undo         forget the last question and answer\n"
            "/save FILE    write the conversation as JSON\n"
            "/help         show this\n"
            "/quit         leave, as Ctrl-D does; Ctrl-C ends an answer early"
        )

    def _quit(self, _: str) -> str:
        raise Quit

    _COMMANDS: ClassVar[dict[str, Callable[["Conversation", str], str]]] = {
        "reset": _reset, "system": _system, "undo": _undo, "save": _save, "help": _help, "quit": _quit,
    }  # fmt: skip
