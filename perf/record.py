"""Recording a benchmark: a table on the terminal, and a JSON file with machine, date and commit beside it."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def record(name: str, rows: Sequence[Mapping[str, Any]], *, title: str, folder: Path = RESULTS, **more: Any) -> Path:
    """Print `rows` and write them, and what `more` names, to `<name>.json` in `folder`."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    result = {
        "title": title,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": machine(),
        "rows": list(rows),
        **more,
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
