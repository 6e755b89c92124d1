"""A visit to an engine: its driver as a new process, asked over pipes, its memory, and who else used the machine.

Memory is the kernel's peak of resident memory (VmHWM), summed over the processes, less what they share (RSS - PSS):
pages that two processes map count once. Files that are mapped and were read count, as they do in RSS.
Read next: perf/peers/driver.py, the other end.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Self

from perf.peers.driver import ANSWER

Request = dict[str, Any]


class Contestant(NamedTuple):
    """An engine with one kind of weights, and the command that starts its driver."""

    engine: str
    dtype: str
    command: list[str]

    @property
    def name(self) -> str:
        return f"{self.engine} {self.dtype}"


class Visit:
    """A driver's process, which ends with the `with`."""

    def __init__(self, contestant: Contestant, log: Path) -> None:
        """Start it and wait for its first token. Raises RuntimeError if it ends before; stderr goes to `log`."""
        self._log = log
        begin = perf_counter()
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                contestant.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self.version: str = self._answer()["version"]
        self.start_seconds = perf_counter() - begin
        self.peak_memory_mb = 0.0
        self._seconds = self._other_seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=30)
        finally:
            self._process.kill()

    def run(self, requests: Sequence[Request]) -> float:
        """Seconds until the last of `requests`, which come at once, has ended."""
        question = {name: [request[name] for request in requests] for name in ("prompt", "max_tokens")}
        assert self._process.stdin is not None
        begin, others = perf_counter(), other_cpu_seconds(self._process.pid)
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._seconds += perf_counter() - begin
        self._other_seconds += other_cpu_seconds(self._process.pid) - others
        self.peak_memory_mb = max(self.peak_memory_mb, memory_mb(answer["process_id"]))
        return float(answer["seconds"])

    @property
    def other_cores(self) -> float:
        """What everything else took of the machine while this ran, in cores; near 0 on a quiet one."""
        return max(0.0, self._other_seconds / self._seconds)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                content: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return content
        raise RuntimeError(f"{self._process.args} ended, its stderr is in {self._log}")


def memory_mb(root: int) -> float:
    """The peak of `root` and its descendants in MB (10^6 bytes)."""
    return sum(map(_process_kb, _tree(root))) * 1024 / 1e6


def other_cpu_seconds(root: int) -> float:
    """What the machine has spent on anything but `root` and its descendants, time stolen by its host included."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    mine = 0
    for process_id in _tree(root):
        # utime, stime, and those of children that have ended; the name before them may hold spaces
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        mine += sum(map(int, fields[11:15]))
    return (user + nice + system + irq + softirq + steal - mine) / os.sysconf("SC_CLK_TCK")


def _process_kb(process_id: int) -> int:
    folder = Path(f"/proc/{process_id}")
    peak, rollup = (folder / "status").read_text(), (folder / "smaps_rollup").read_text()
    return _field("VmHWM", peak) - (_field("Rss", rollup) - _field("Pss", rollup))


def _field(name: str, text: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def _tree(root: int) -> Iterator[int]:
    yield root
    for thread in Path(f"/proc/{root}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended since
            for child in (thread / "children").read_text().split():
                yield from _tree(int(child))
