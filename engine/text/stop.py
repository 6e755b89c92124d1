"""StopMatcher: finds stop strings in text that arrives in pieces.

Invariant: `_held` is the longest end of the text so far that a stop string could start with (and
is longer than). Everything before it is out, so nothing of a stop string is ever sent, and text
that can't be the start of one is never late.

Each push looks for the stop strings in the held text and the new text only, so a character's cost
depends on the stop strings, not on the output: a start position is tried once more only while it
is held, and it is held only while it matches.
"""

from collections.abc import Sequence


class StopMatcher:
    """Matches non-empty stop strings. The match that ends first wins; of those that end together, the longest."""

    __slots__ = ("_by_first", "_held", "_include_stop", "_stops")

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self._by_first: dict[str, list[str]] = {}
        for stop in self._stops:
            self._by_first.setdefault(stop[0], []).append(stop)

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take more text; return what may be sent and the stop string that was found, if any.

        After a hit the text returned is the last of the output. `armed=False` takes text in which
        no stop string may end (the first `min_tokens` tokens, as in vLLM); one may begin in it.
        """
        window = self._held + text
        if armed:
            hit = self._find(window)
            if hit is not None:
                end, stop = hit
                self._held = ""
                return window[: end if self._include_stop else end - len(stop)], stop
        start = self._partial_start(window)
        self._held = window[start:]
        return window[:start], None

    def flush(self) -> str:
        """The held text, at a finish for another reason."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:
            # A match must end in the new text: the held text was searched when it came.
            start = window.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
        return best

    def _partial_start(self, window: str) -> int:
        """First position from which on the window is the beginning of a stop string."""
        by_first = self._by_first
        for start, char in enumerate(window):
            if char in by_first:
                rest = window[start:]
                if any(len(rest) < len(stop) and stop.startswith(rest) for stop in by_first[char]):
                    return start
        return len(window)
