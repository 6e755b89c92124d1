"""Graphs: what is launched, recorded and replayed, and how many recordings are kept."""

from typing import Any

from engine.devices.cuda import graphs
from engine.devices.cuda.graphs import Graphs


class Stream:
    """Notes what it is asked for; a recording is the list of what was launched meanwhile."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self._recording: list[str] | None = None

    def launch(self, name: str) -> None:
        (self.ran if self._recording is None else self._recording).append(name)

    def begin_capture(self) -> None:
        self._recording = []

    def end_capture(self) -> Any:
        recorded, self._recording = self._recording, None
        return Recording(recorded or [])


class Recording:
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def launch(self, stream: Stream) -> None:
        stream.ran += [f"replayed {name}" for name in self.names]


def test_a_kind_is_launched_then_recorded_then_replayed() -> None:
    stream, calls = Stream(), []

    def launch() -> None:
        calls.append(len(stream.ran))
        stream.launch("a")
        stream.launch("b")

    recordings = Graphs(stream)
    for _ in range(4):
        recordings.run(1, launch)
    assert stream.ran == ["a", "b", *["replayed a", "replayed b"] * 3]
    assert len(calls) == 2


def test_the_kind_that_was_used_longest_ago_is_forgotten(monkeypatch: Any) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    stream = Stream()
    recordings = Graphs(stream)
    for kind in (1, 2, 1, 3, 1, 2):
        recordings.run(kind, lambda kind=kind: stream.launch(str(kind)))  # type: ignore[misc]
    assert stream.ran == ["1", "2", "replayed 1", "3", "replayed 1", "2"]
