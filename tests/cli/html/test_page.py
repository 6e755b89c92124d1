"""The page: valid HTML in one file, with the numbers that were put in."""

import json
import re
from typing import Any
from xml.etree.ElementTree import Element

import html5lib
import pytest

from engine.cli.html.page import Chart, Finding, Lanes, Page, Row, Series, Table, Tile

HOSTILE = "</script><script>alert(1)</script> & <b>"


def page(**changes: Any) -> Page:
    times = [10.0, 11.0, 13.0]
    series = [Series("running", "c1", [1, 2, 3.5]), Series("waiting", "c2", [0, 0, 1])]
    values: dict[str, Any] = {
        "title": HOSTILE,
        "subtitle": "sub",
        "facts": {"device": HOSTILE, "trace": None},
        "origin": 10.0,
        "tiles": [Tile("throughput", "12.5 tok/s", HOSTILE)],
        "findings": [Finding("Bottleneck", "do this")],
        "charts": [
            Chart("bars", "bars", "note", "ms", times, [11.0, 12.5, 14.0], series),
            Chart("lines", "lines", "note", "%", times, [11.0, 13.0, 14.0], series),
            Lanes("requests", "note", [("queued", "c6"), ("decode", "c1")], [
                ("second", (10.5, 11.0, 12.0)), (HOSTILE, (10.0, 10.25, 11.0)), ("third", (11.0, 11.0, 12.0)),
            ]),
        ],
        "tables": [Table(("name", "p50"), [Row(("a", "1.5"), [1, 10, 100]), Row(("b", "0"), [0.0])], unit="ms")],
        "numbers": {"text": HOSTILE, "value": 0.1},
    }  # fmt: skip
    return Page(**(values | changes))


def parse(html: str) -> Element:
    """Raises where a browser would have to guess."""
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(html)


def document(root: Element, name: str) -> Any:
    (element,) = root.findall(f".//script[@id='{name}']")
    return json.loads(element.text or "")


def assert_self_contained(html: str) -> None:
    root = parse(html)
    references = [e.get(name) for e in root.iter() for name in ("src", "href", "action", "data") if e.get(name)]
    assert references == ["data:,"]
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|WebSocket", html)


def test_it_is_valid_and_loads_nothing() -> None:
    assert_self_contained(page().render())
    parse(page(charts=[], tables=[], tiles=[], findings=[]).render())


def test_text_is_text() -> None:
    root = parse(page().render())
    assert len(root.findall(".//script")) == 3
    assert root.findtext(".//h1") == root.findtext(".//title") == HOSTILE
    assert document(root, "report") == {"text": HOSTILE, "value": 0.1}
    (fact,) = root.findall(".//header/dl/div/dd")
    assert fact.text == HOSTILE
    (tile,) = root.findall(".//main/dl/div/dd")
    assert tile.text == "12.5 tok/s" and tile.findtext("small") == HOSTILE


def test_charts_carry_their_numbers_from_the_origin_on() -> None:
    bars, lines, lanes = document(parse(page().render()), "data")
    assert (bars["kind"], bars["starts"], bars["ends"]) == ("bars", [0.0, 1.0, 3.0], [1.0, 2.5, 4.0])
    assert lines["series"][0] == {"name": "running", "colour": "c1", "values": [1.0, 2.0, 3.5]}
    spans = [(s["label"], s["lane"], s["times"]) for s in lanes["spans"]]
    # The third begins when the first has ended, and takes its lane.
    assert spans == [(HOSTILE, 0, [0, 0.25, 1]), ("second", 1, [0.5, 1, 2]), ("third", 0, [1, 1, 2])]


def test_distributions_are_drawn_over_one_logarithmic_axis() -> None:
    """1, 10 and 100 are at the left, in the middle and at the right of 64 columns; zeros have no place."""
    table = page().tables[0]
    assert table.bounds == (1, 100)
    heights = re.findall(r"V([\d.]+)H(\d+)", table.shape(table.rows[0]))
    assert [int(x) for y, x in heights if float(y) == 0.0] == [1, 33, 64]
    assert table.shape(table.rows[1]) == ""


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1, 100], [(0, "1"), (0.5, "10"), (1, "100")]),
        ([0.02, 16_980], [(0.1179, "0.1"), (0.4552, "10"), (0.7926, "1,000")]),
        ([2.0, 9.0], [(0, "2"), (0.6092, "5")]),
        ([5.0, 5.0], [(0, "5")]),
    ],
)
def test_ticks_are_at_round_values(values: list[float], ticks: list[tuple[float, str]]) -> None:
    table = Table(("a",), [Row(("x",), values)], unit="ms")
    assert [text for _, text in table.ticks] == [text for _, text in ticks]
    assert [at for at, _ in table.ticks] == pytest.approx([at for at, _ in ticks], abs=1e-3)


@pytest.mark.parametrize("bins", [[], [0.0, 0.0], [5.0]])
def test_tables_without_a_spread(bins: list[float]) -> None:
    table = Table(("a",), [Row(("x",), bins)], unit="ms")
    assert table.shape(table.rows[0]) == ""
