"""The page of a profile has the profile's numbers."""

import pytest

from engine.cli.profile.advice import bottleneck
from engine.cli.profile.page import make_page
from engine.cli.profile.report import Report, make_report
from engine.config import EngineConfig
from engine.observe.records import PHASES, Profile
from tests.cli.html.test_page import assert_self_contained, document, parse
from tests.engine.timed import timed_server

FACTS = {"device": "cpu: test", "dtype": "float32", "workload": "3 prompts of 8 tokens"}
CONFIG = EngineConfig(model="folder/m", max_num_batched_tokens=512)


@pytest.fixture
async def profile() -> Profile:
    async with timed_server(num_blocks=10, budget=8) as server:
        await server.settle()
        server.observer.start_profile()
        streams = [server.generate([i] * 8, 16) for i in range(3)]
        await server.settle()
        assert len(streams) == 3
        return server.observer.stop_profile()


def render(profile: Profile) -> tuple[Report, str]:
    report = make_report(profile, CONFIG)
    return report, make_page(profile, CONFIG, report, FACTS).render()


async def test_its_numbers_are_the_reports(profile: Profile) -> None:
    report, html = render(profile)
    assert_self_contained(html)
    root = parse(html)
    assert document(root, "report") == FACTS | report.as_dict()
    assert {d.findtext("dt"): d.findtext("dd") for d in root.findall(".//header/dl/div")} == FACTS
    tiles = {d.findtext("dt"): (d.find("dd").text, d.findtext("dd/small")) for d in root.findall(".//main/dl/div")}
    ttft, tpot = report.time_to_first_token, report.time_per_output_token
    assert tiles["TTFT, median"] == (f"{ttft.p50 * 1000:.2f} ms", f"p99 {ttft.p99 * 1000:.2f} ms")
    assert tiles["TPOT, median"] == (f"{tpot.p50 * 1000:.2f} ms", f"p99 {tpot.p99 * 1000:.2f} ms")
    assert tiles["output throughput"][0] == f"{48 / report.wall:.1f} tok/s"
    rows = {tr.findtext("td"): [td.text for td in tr.findall("td")] for tr in root.findall(".//tbody/tr")}
    assert rows["device (wait)"][1] == f"{report.phases['device'].p50 * 1000:.1f}"  # 10 s
    assert rows["end to end"][4] == f"{report.e2e_latency.max * 1000:.1f}"  # above a second
    assert bottleneck(report).name in root.findtext(".//section/h2", "")


async def test_its_charts_are_the_iterations_and_requests(profile: Profile) -> None:
    report, html = render(profile)
    time, tokens, sequences, kv, lanes = document(parse(html), "data")
    assert [s["name"] for s in time["series"]] == list(PHASES)
    for series in time["series"]:
        assert sum(series["values"]) == pytest.approx(1e3 * report.phases[series["name"]].total)
    assert all(len(c["starts"]) == report.num_iterations for c in (time, tokens, sequences, kv))
    decode, prefill = (sum(s["values"]) for s in tokens["series"])
    assert decode == report.decode_rows.total and decode + prefill == report.tokens.total
    assert max(sequences["series"][1]["values"]) == report.waiting.max
    assert len(lanes["spans"]) == 3
    queued = [s["times"][1] - s["times"][0] for s in lanes["spans"]]
    assert sum(queued) == pytest.approx(report.queue_time.total)


def test_nothing_makes_a_page() -> None:
    _, html = render(Profile(1.0, 2.0, [], []))
    assert document(parse(html), "data") == []
