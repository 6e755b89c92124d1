"""Progress on stderr: a bar of bytes and their rate on a terminal, elsewhere a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_SECONDS = 5.0
"""Between lines: what is done sooner has none."""


class Lines:
    """Called with bytes just done, says how far it is when some time has passed."""

    def __init__(self, description: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._description, self._total, self._clock = description, total, clock
        self._done, self._told = 0, clock()

    def __call__(self, count: int) -> None:
        self._done += count
        if self._clock() - self._told >= LINE_SECONDS:
            self._told = self._clock()
            share = 100 * self._done // max(1, self._total)
            print(
                f"{self._description}: {self._done >> 20} of {self._total >> 20} MiB, {share}%",
                file=sys.stderr,
                flush=True,
            )


@contextmanager
def byte_progress(description: str, total: int, show: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of bytes just done.

    Args:
        total: bytes in all.
        show: a bar, or nothing at all; None is a bar on a terminal and lines elsewhere.
    """
    if show is False or (show is None and total < 1 << 20):
        yield lambda _: None
        return
    if show is None and not sys.stderr.isatty():
        yield Lines(description, total)
        return
    # rich takes about 0.1 s to import, which a server without a terminal need not pay
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)
