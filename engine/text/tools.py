"""Tool calls in a model's text: `tool_parser(format, names)` finds them while the text streams.

    text  --opening-->  head {"name": ..., "arguments":  --{-->  arguments  --}-->  tail  --closing-->  text

Plain text passes through at once, but for what could be the start of a marker. A call's name comes out when its
arguments begin, the arguments in pieces as they arrive, as the model wrote them. What turns out before that not
to be a call comes out as text; white space around a call is dropped. How a text is cut changes nothing.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

from engine.text.tool_formats import TOOL_FORMATS, ToolFormat


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; `index` counts the calls of one text from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments; the pieces of one call concatenate."""

    index: int
    json_fragment: str


ToolEvent = TextDelta | ToolCallStart | ToolCallArguments


class ToolParser(Protocol):
    """Finds the calls in one text."""

    def feed(self, text: str) -> list[ToolEvent]:
        """What `text`, the continuation of the text so far, makes known."""

    def finish(self) -> list[ToolEvent]:
        """The text has ended: what was held back."""


def tool_parser(format: str, names: Collection[str]) -> ToolParser:
    """A parser for one text in a format of TOOL_PARSERS; what calls none of `names` is text. Raises KeyError."""
    return _CallParser(TOOL_FORMATS[format], frozenset(names))


class _CallParser:
    """ToolParser of a format.

    `_text` is what has not come out yet, read up to `_at`. A call that has not shown its name is kept
    from `_opening_at` on, its JSON from `_head_at` on: if it is no call after all, it is read again, as text.
    """

    def __init__(self, format: ToolFormat, names: frozenset[str]) -> None:
        self._format = format
        self._names = names
        self._text = ""
        self._at = 0
        self._opening_at = 0
        self._head_at = 0
        self._call: _Call | None = None
        self._num_calls = 0
        self._may_be_bare = format.bare
        self._behind: Literal["closing", "space"] | None = None

    def feed(self, text: str) -> list[ToolEvent]:
        self._text += text
        return _merged(self._read(ended=False))

    def finish(self) -> list[ToolEvent]:
        events = self._read(ended=True)
        while self._call is not None and self._call.state == "head":
            self._give_up(events)
            events += self._read(ended=True)
        return _merged(events)

    def _read(self, ended: bool) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        goes_on = True
        while goes_on and self._at < len(self._text):
            if self._call is not None:
                self._read_call(self._call, events)
            elif self._behind is not None:
                goes_on = self._read_behind(self._behind, ended)
            else:
                goes_on = self._read_text(events, ended)
        done = self._opening_at if self._call is not None and self._call.state == "head" else self._at
        self._text = self._text[done:]
        self._at, self._opening_at, self._head_at = self._at - done, self._opening_at - done, self._head_at - done
        return events

    def _read_call(self, call: "_Call", events: list[ToolEvent]) -> None:
        self._at = call.read(self._text, self._head_at, self._at, events)
        if call.state == "not a call":
            self._give_up(events)
        elif call.state == "ended":
            self._call, self._behind = None, "closing"
            self._num_calls += 1

    def _read_behind(self, behind: Literal["closing", "space"], ended: bool) -> bool:
        """Skip white space and a closing marker behind a call; False waits for more."""
        closing = self._format.closing
        self._at = _after_space(self._text, self._at)
        if behind == "closing" and self._at < len(self._text):
            if not ended and closing.startswith(self._text[self._at :]) and not self._text.endswith(closing):
                return False
            self._at += len(closing) * self._text.startswith(closing, self._at)
            self._behind = "space"
        elif behind == "space" and self._at < len(self._text):
            self._behind, self._may_be_bare = None, self._format.bare
        return True

    def _read_text(self, events: list[ToolEvent], ended: bool) -> bool:
        """Pass text on up to the next call or what could become one; False waits for more."""
        if self._may_be_bare:
            first = _after_space(self._text, self._at)
            if first == len(self._text) and not ended:
                return False
            self._may_be_bare = False
            if self._text.startswith("{", first):
                self._begin(self._at, first)
                return True
        opening = self._format.opening
        found = self._text.find(opening, self._at)
        stop = found if found >= 0 else len(self._text) - (0 if ended else _overlap(self._text, opening))
        text = self._text[self._at : max(stop, self._at)]
        if found >= 0 or not ended:
            text = text.rstrip()
        if text:
            events.append(TextDelta(text))
        self._at += len(text)
        if found >= 0:
            self._begin(self._at, found + len(opening))
        return found >= 0

    def _begin(self, opening_at: int, head_at: int) -> None:
        self._opening_at, self._head_at, self._at = opening_at, head_at, head_at
        self._call = _Call(self._num_calls, self._names)

    def _give_up(self, events: list[ToolEvent]) -> None:
        """It was no call: its opening, or the bracket of a bare one, is text, and what follows is read as text."""
        is_bare = not self._text[self._opening_at : self._head_at].strip()
        self._at = self._head_at + is_bare
        self._call = None
        events.append(TextDelta(self._text[self._opening_at : self._at]))


_MAX_HEAD = 1024
"""Characters up to a call's arguments that are searched for each time there are more."""

_HEAD = re.compile(
    r"""\s*\{ (?:\s* "(?:id|type)" \s*:\s* "[^"\\]*" \s*,)*
    \s* "name" \s*:\s* (?P<name> "(?:[^"\\]|\\.)+") \s*, \s* "(?:arguments|parameters)" \s*:\s* (?=\{)""",
    re.VERBOSE | re.DOTALL,
)
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
_KEYS = {"name", "arguments", "parameters", "id", "type"}


class _Call:
    """One call being read: a JSON object of a name, one of `names`, and arguments."""

    def __init__(self, index: int, names: frozenset[str]) -> None:
        self.state: Literal["head", "arguments", "tail", "ended", "not a call"] = "head"
        self._index = index
        self._names = names
        self._brackets = _Brackets()

    def read(self, text: str, head_at: int, at: int, events: list[ToolEvent]) -> int:
        """Read on at `at`; where the call, whose JSON began at `head_at`, or `text` ends."""
        if self.state == "head":
            at = self._read_head(text, head_at, at, events)
        if self.state == "arguments":
            end = self._brackets.read(text, at)
            if end > at:
                events.append(ToolCallArguments(self._index, text[at:end]))
            at = end
            if self._brackets.state == "closed":
                self.state, self._brackets = "tail", _Brackets("{")
            elif self._brackets.state == "broken":
                self.state = "ended"
        if self.state == "tail":
            at = self._brackets.read(text, at)
            if self._brackets.state != "open":
                self.state = "ended"
        return at

    def _read_head(self, text: str, head_at: int, at: int, events: list[ToolEvent]) -> int:
        if at - head_at < _MAX_HEAD:
            key = _FIRST_KEY.match(text, head_at, head_at + _MAX_HEAD)
            if key and key[1] not in _KEYS:
                self.state = "not a call"
                return at
            match = _HEAD.match(text, head_at, head_at + _MAX_HEAD)
            name = str(_parsed(match["name"])) if match else ""
            if match and name not in self._names:
                self.state = "not a call"
                return at
            if match:
                events.append(ToolCallStart(self._index, name))
                self.state, self._brackets = "arguments", _Brackets()
                return match.end()
        end = self._brackets.read(text, at)
        if self._brackets.state == "closed" and self._is_call(_parsed(text[head_at:end]), events):
            self.state = "ended"
        elif self._brackets.state != "open":
            self.state = "not a call"
        return end

    def _is_call(self, call: object, events: list[ToolEvent]) -> bool:
        """Take a whole object, whose parts came in another order or form, if it is a call."""
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(name, str) or name not in self._names:
            return False
        arguments = _arguments(call)
        if arguments is None:
            return False
        events.append(ToolCallStart(self._index, name))
        events.append(ToolCallArguments(self._index, json.dumps(arguments, ensure_ascii=False)))
        return True


def _arguments(call: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments as an object, also those that a model wrote as JSON in a string, or as nothing; None for none."""
    if not call.keys() & {"arguments", "parameters"}:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        arguments = _parsed(arguments)
    elif not arguments:
        arguments = {}
    return arguments if isinstance(arguments, dict) else None


_STRING = re.compile(r'[^"\\]*')
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s\w.,:+-]*")


class _Brackets:
    """Finds where a JSON object ends while its text comes, by brackets and strings. `opened` are those open already."""

    def __init__(self, opened: str = "") -> None:
        self.state: Literal["open", "closed", "broken"] = "open"
        self._opened = list(opened)
        self._in_string = False
        self._escaped = False

    def read(self, text: str, at: int) -> int:
        """Read on at `at`; where the object, or `text`, ends."""
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            at = self._run().match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if at == len(text):
                break
            if not self._take(text[at]):
                self.state = "broken"
                break
            at += 1
            if not self._opened:
                self.state = "closed"
                break
        return at

    def _run(self) -> re.Pattern[str]:
        """What may come before the next bracket, quote or backslash."""
        return _STRING if self._in_string else _BETWEEN if self._opened else _SPACE

    def _take(self, char: str) -> bool:
        """A bracket, a quote or a backslash; False if it cannot be here."""
        if self._in_string:
            self._escaped = char == "\\"
            self._in_string = self._escaped
        elif char == '"' and self._opened:
            self._in_string = True
        elif char == "{" or (char == "[" and self._opened):
            self._opened.append(char)
        else:
            return bool(self._opened) and self._opened.pop() + char in ("{}", "[]")
        return True


def _parsed(text: str) -> object:
    """JSON, in whose strings a model may write control characters as they are; None when it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too


def _overlap(text: str, opening: str) -> int:
    """Length of the longest end of `text` that begins the marker."""
    return next(n for n in range(min(len(opening) - 1, len(text)), -1, -1) if text.endswith(opening[:n]))


def _merged(events: list[ToolEvent]) -> list[ToolEvent]:
    """Neighbouring pieces of text as one."""
    merged: list[ToolEvent] = []
    for is_text, group in groupby(events, lambda event: isinstance(event, TextDelta)):
        if is_text:
            merged.append(TextDelta("".join(event.text for event in group if isinstance(event, TextDelta))))
        else:
            merged += group
    return merged
