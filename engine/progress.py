"""The progress bar of the offline API: prompts done, and tokens per second in and out, as vLLM shows them."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.request import RequestOutput


@contextmanager
def prompt_progress(
    total: int, show: bool, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[RequestOutput], None]]:
    """Yields what to call, from any thread, with each finished prompt. Silent when stderr is no terminal."""
    if not show or not sys.stderr.isatty():
        yield lambda output: None
        return
    # rich takes 60 ms to import, for a bar that few calls show
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        *(TextColumn("Processed prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TextColumn("in {task.fields[speed_in]:.0f} tok/s, out {task.fields[speed_out]:.0f} tok/s"),
    )
    tokens_in = tokens_out = 0
    with Progress(*columns, console=Console(stderr=True), get_time=clock) as progress:
        bar = progress.add_task("", total=total, speed_in=0.0, speed_out=0.0)

        def advance(output: RequestOutput) -> None:
            nonlocal tokens_in, tokens_out
            tokens_in += len(output.prompt_token_ids)
            tokens_out += sum(len(choice.token_ids) for choice in output.outputs)
            elapsed = progress.tasks[bar].elapsed or 1e-9
            progress.update(bar, advance=1, speed_in=tokens_in / elapsed, speed_out=tokens_out / elapsed)

        yield advance
