"""Screen: what `engine chat` shows. On a terminal, answers are Markdown that grows; elsewhere, plain text as it comes.

Only answers go to stdout, so that a script's pipe gets nothing else; notes and numbers go to stderr.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

PROMPT = "> "
_REFRESHES_PER_SECOND = 10


class Screen:
    """Reads the user's lines and shows answers and notes."""

    def __init__(self) -> None:
        self._out = Console()
        self._notes = Console(stderr=True, highlight=False)
        self.is_interactive = sys.stdin.isatty() and self._out.is_terminal
        if self.is_interactive:
            with suppress(ImportError):  # Python may be built without
                import readline  # noqa: F401 (gives input() editing and history)

    def read(self) -> str:
        """The user's next line. Raises EOFError at its end and KeyboardInterrupt."""
        if self.is_interactive:
            return input(PROMPT)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def note(self, text: str) -> None:
        """Something that is not part of an answer."""
        self._notes.print(text, style="dim", markup=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """Something that went wrong."""
        self._notes.print(text, style="red", markup=False, soft_wrap=True)

    def new_line(self) -> None:
        """End a line that the user left with Ctrl-C or Ctrl-D."""
        if self.is_interactive:
            self._notes.print()

    @contextmanager
    def answer(self) -> Iterator["Answer"]:
        """Show an answer while the block adds its text; what there is stays when the block ends in any way."""
        if not self._out.is_terminal:
            answer = Answer()
            try:
                yield answer
            finally:
                sys.stdout.write("\n")
                sys.stdout.flush()
            return
        shown = MarkdownAnswer()
        with Live(shown, console=self._out, transient=True, refresh_per_second=_REFRESHES_PER_SECOND):
            try:
                yield shown
            finally:
                shown.is_whole = True
        self._out.print(Markdown(shown.text))


class Answer:
    """The text of an answer so far, written to stdout as it comes."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, text: str) -> None:
        """Take the next piece."""
        self.text += text
        sys.stdout.write(text)
        sys.stdout.flush()


class MarkdownAnswer(Answer):
    """Rendered by `Live`: the last lines that fit on the screen."""

    is_whole = False

    def add(self, text: str) -> None:
        self.text += text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.is_whole:
            return
        lines = console.render_lines(Markdown(self.text or "…"), options, pad=False)
        for line in lines[-max(1, console.size.height - 1) :]:
            yield from line
            yield Segment.line()
