"""Progress bars on stderr: bytes done and their rate; silent unless stderr is a terminal or asked for."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(description: str, total: int, show: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of bytes just done.

    Args:
        total: bytes in all.
        show: None shows a bar when stderr is a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda _: None
        return
    # rich takes about 0.1 s to import, which a server without a terminal need not pay
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)
