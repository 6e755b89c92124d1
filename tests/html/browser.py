"""Opening a page in headless Chromium, where there is one."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: the page's script is not run")


def opened(page: Path) -> tuple[str, list[str]]:
    """The document after its script has run, and what went to the console."""
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1200,2000",
         f"--user-data-dir={page.parent / 'chromium'}", "--virtual-time-budget=1000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, re.findall(r".*CONSOLE.*", done.stderr)
