"""`engine profile` on a real checkpoint, through the command line."""

import csv
import json
from functools import partial
from pathlib import Path

import pytest

from engine.cli.profile.display import live_table
from engine.observe.records import PHASES, IterationRecord
from tests.conftest import Run

LLAMA = Path(__file__).parents[2] / "golden" / "llama"
SMALL = ("--num-prompts", "3", "--input-len", "20", "--output-len", "5", "--kv-cache-memory-bytes", "1000000")


@pytest.fixture
def profile(run: Run) -> Run:
    return partial(run, "profile", "--device", "cpu")


def test_the_report_and_its_files(profile: Run, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "trace", "html")}
    options = [argument for name, path in files.items() for argument in (f"--{name}", str(path))]
    code, out, err = profile(str(LLAMA), *SMALL, "--shared-prefix-len", "16", *options)
    assert (code, err) == (0, "")
    assert "Bottleneck: " in out and all(name in out for name in PHASES)
    report = json.loads(files["json"].read_text())
    assert (report["num_requests"], report["prompt_tokens"], report["output_tokens"]) == (3, 60, 15)
    # All three come at once: the first computes the shared block, which the others wait for and find.
    assert report["cached_tokens"] == 32
    assert abs(report["residual"]) <= 0.02 * report["wall"]
    assert report["device_busy"] > 0 and report["time_per_output_token"]["p50"] > 0
    assert report["bottleneck"].keys() == {"name", "evidence", "advice"}
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert len(rows) == report["num_iterations"]
    assert sum(int(r["tokens"]) for r in rows) == 60 - 32 + 3 * 4
    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert sum(e["ph"] == "b" and e["name"] == "prefill" for e in events) == 3
    assert "Profile of llama" in files["html"].read_text()


def test_json_to_stdout_is_alone_there(profile: Run) -> None:
    code, out, err = profile(str(LLAMA), *SMALL, "--request-rate", "200", "--json", "-")
    assert code == 0
    assert json.loads(out)["num_requests"] == 3
    assert "Bottleneck: " in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--num-prompts", "0"], "num_prompts"),
        (["--input-len", "1000000"], "input_len + output_len"),
        (["--shared-prefix-len", "500"], "shared_prefix_len"),
        (["--request-rate", "often"], "--request-rate"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
    ],
)
def test_bad_usage_is_one_line(profile: Run, arguments: list[str], says: str) -> None:
    code, out, err = profile(str(LLAMA), *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("engine: error: ") and says in err


def test_a_path_that_cannot_be_written_is_found_before_the_run(profile: Run) -> None:
    code, out, err = profile("/no/such/model", "--trace", "/no/such/folder/t.json")
    assert (code, out) == (1, "")
    assert err == "engine: error: [Errno 2] No such file or directory: '/no/such/folder/t.json'\n"


def test_the_live_table_shows_the_last_iterations() -> None:
    phases = tuple(0.001 for _ in PHASES)
    records = [
        IterationRecord(n * 0.1, 0.092, phases, n, n - 1, 7, 0, 3, 5, 4, 6, 0.25, 1.0, 0, 0.002) for n in range(1, 200)
    ]
    table = live_table(records)
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["4", "6", "7", "50", "25%", "7.000", "1.000", "2.000"]
    assert live_table([]).row_count == 0
