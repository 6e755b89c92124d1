"""Progress bars on stderr: bytes done and their rate; silent unless stderr is a terminal or asked for."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from loader.weights import WeightSource


@contextmanager
def byte_progress(description: str, total: int | None, show: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of bytes just done.

    Args:
        total: bytes in all, None when unknown.
        show: None shows a bar when stderr is a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda _: None
        return
    # rich takes 60 ms to import, which a server without a terminal need not pay
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)


def read_weights(source: WeightSource, show: bool | None = None) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every parameter of `source` in order; a tensor counts as done when the caller asks for the next."""
    with byte_progress("Loading weights", source.nbytes, show) as advance:
        for name in source.names:
            tensor = source.tensor(name)
            yield name, tensor
            advance(tensor.nbytes)
