"""A real Prometheus, as Debian packages it, that scrapes one address every second."""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs: [{{job_name: engine, static_configs: [{{targets: ["{target}"]}}]}}]
"""


class Prometheus:
    """Its query API."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/query"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an instant query gives: series, with their labels and value. A bad query raises HTTPError."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self._url}?{query}", timeout=10) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result

    def until_numbers(self, expressions: list[str], seconds: float, between: Callable[[], None]) -> list[str]:
        """Ask until every expression gives a number, `between` two rounds; returns those that never did."""
        deadline = time.monotonic() + seconds
        missing = expressions
        while missing and time.monotonic() < deadline:
            between()
            missing = [e for e in missing if not any(s["value"][1] != "NaN" for s in self.query(e))]
        return missing


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    """Scrapes http://`target`/metrics; keeps its data in `folder`."""
    config = folder / "prometheus.yaml"
    config.write_text(CONFIG.format(target=target))
    command = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    process = subprocess.Popen(command, text=True, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        found = next((m for line in lines if (m := re.search(r'msg="Listening on" address=(\S+)', line))), None)
        assert found is not None, "prometheus did not start"
        yield Prometheus(found[1])
    finally:
        process.kill()
        process.communicate()
