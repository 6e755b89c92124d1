"""Graphs: launches that repeat, recorded once and then queued by one call.

A step in which every row decodes is some 300 launches of a few microseconds each, and a launch costs the host more than
that (12 us on an H200's). Recording takes what they cost once, so it waits until a kind of step comes for the
second time. A recording keeps the arguments: what differs between steps of one kind must lie in buffers.
"""

from collections.abc import Callable, Hashable
from typing import Any

MOST_GRAPHS = 64
"""Recordings kept, the latest used; kinds are numbers of rows, of which few are at work at a time."""


class Graphs:
    """Recordings of one stream by kind."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._graphs: dict[Hashable, Any] = {}

    def run(self, kind: Hashable, launch: Callable[[], None]) -> None:
        """Queue what `launch` queues; it may be called, recorded, or left alone, and must do the same each time."""
        known = kind in self._graphs
        graph = self._graphs.pop(kind, None)
        if not known:
            launch()
        else:
            graph = graph or self._record(launch)
            graph.launch(self._stream)
        self._graphs[kind] = graph
        if len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]

    def _record(self, launch: Callable[[], None]) -> Any:
        self._stream.begin_capture()
        try:
            launch()
        finally:
            graph = self._stream.end_capture()
        return graph
