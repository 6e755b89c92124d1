"""The dashboards, ours and those of others: what their panels ask for is there, in a real Prometheus."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.observe.prometheus import Prometheus, prometheus
from tests.rpc.real import http_server_process, make_checkpoint

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "docs" / "grafana"
DASHBOARD = json.loads((GRAFANA / "engine.json").read_text())
OTHERS = tomllib.loads(Path(__file__).with_name("dashboards.toml").read_text())["dashboard"]
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
ALL_SERIES = sorted({series for dashboard in OTHERS for series in dashboard["series"]})

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus: .ci/tools.sh")


@dataclass
class Scraped:
    """An engine, its HTTP address, and the Prometheus that scrapes it."""

    http: str
    prometheus: Prometheus

    def load(self) -> None:
        """Completions that differ in length, and one that finds its prompt cached."""
        for tokens in (1, 24, 24):
            body = {"prompt": list(range(3, 90)), "max_tokens": tokens, "ignore_eos": True}
            httpx.post(f"{self.http}/v1/completions", json=body, timeout=30).raise_for_status()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    model = make_checkpoint(tmp_path_factory.mktemp("model"))
    with (
        http_server_process(model) as addresses,
        prometheus(addresses.http.removeprefix("http://"), folder) as scraper,
    ):
        yield Scraped(addresses.http, scraper)


def as_grafana_asks(expression: str) -> str:
    """A panel's query with the variables that Grafana puts in."""
    for variable, value in {"$__rate_interval": "4s", "$model_name": ".*", "$job": ".*"}.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


@needs_prometheus
def test_every_panel_of_our_dashboard_shows_numbers(scraped: Scraped) -> None:
    expressions = [as_grafana_asks(expression) for _, expression in QUERIES]
    assert scraped.prometheus.until_numbers(expressions, 30, scraped.load) == []


@needs_prometheus
def test_every_series_that_other_dashboards_ask_for_exists(scraped: Scraped) -> None:
    assert scraped.prometheus.until_numbers(ALL_SERIES, 30, scraped.load) == []


@needs_prometheus
def test_what_is_measured_is_what_was_sent(scraped: Scraped) -> None:
    """The server rests, so that a scrape sees whole requests: 87 tokens of prompt each, one choice each."""
    scraped.load()
    true = [
        "vllm:request_prompt_tokens_sum == 87 * vllm:request_prompt_tokens_count > 0",
        "vllm:request_max_num_generation_tokens_sum == vllm:generation_tokens_total > 0",
        "vllm:prompt_tokens_total - vllm:request_prefill_kv_computed_tokens_sum == vllm:prompt_tokens_cached_total > 0",
        'http_requests_total{handler="/v1/completions", status="2xx"} == on () '
        'vllm:request_success_total{finished_reason="length"} > 0',
    ]
    assert scraped.prometheus.until_numbers(true, 30, lambda: None) == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: .ci/tools.sh")
def test_the_alert_rules_are_rules_over_series_that_exist() -> None:
    rules = GRAFANA / "alerts.yaml"
    checked = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    names = set(re.findall(r"\b(?:vllm|engine):\w+|\bup\b", rules.read_text()))
    assert names <= {re.sub(r"\{.*", "", s) for s in ALL_SERIES} | {"engine:leaked_blocks"}


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Ids are unique, panels lie in the grid of 24 columns and overlap nowhere, variables that are used exist."""
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    assert DASHBOARD["schemaVersion"] >= 39
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not own & cells
        cells |= own
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = {name for _, expression in QUERIES for name in re.findall(r"\$(\w+)", expression)}
    assert used - {"__rate_interval"} <= variables
    assert variables == {"datasource", "job", "model_name"}
