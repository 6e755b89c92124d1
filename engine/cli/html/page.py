"""Page: a report as one HTML file, of tiles, findings, tables and charts over a common time axis.

Numbers that charts draw are in the page as JSON, in the element `data`; tiles and tables are text. Nothing is
loaded from anywhere, and the page's policy forbids it.
Read next: `page.html` (the template), `timeline.js`, `engine/cli/profile/page.py` (what fills it).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

_FOLDER = Path(__file__).parent
_CANVAS = _FOLDER.parents[2] / "rpc/http/page/canvas.js"
BINS = 64
"""Columns of a distribution."""
MAX_TICKS = 5


class Tile(NamedTuple):
    """One number that matters."""

    label: str
    value: str
    note: str = ""


class Finding(NamedTuple):
    """A sentence to act upon."""

    heading: str
    text: str


class Series(NamedTuple):
    """Values of a chart, one for each of its times, in a colour that `page.css` names."""

    name: str
    colour: str
    values: Sequence[float]


class Chart(NamedTuple):
    """Series over time. `kind`: "bars" stacks them from `starts` to `ends`; "lines" steps from value to value."""

    kind: str
    title: str
    note: str
    unit: str
    starts: Sequence[float]
    ends: Sequence[float]
    series: Sequence[Series]


class Lanes(NamedTuple):
    """Spans that overlap, each in parts.

    Attributes:
        parts: names and colours of the parts.
        spans: label, and the time at which the first part begins and each part ends.
    """

    title: str
    note: str
    parts: Sequence[tuple[str, str]]
    spans: Sequence[tuple[str, Sequence[float]]]


class Row(NamedTuple):
    """A row of a table; `values` are what its distribution is drawn from."""

    cells: Sequence[str]
    values: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; with `unit`, a last column shows the distributions over one logarithmic axis."""

    headings: Sequence[str]
    rows: Sequence[Row]
    unit: str = ""

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Where round values are on the axis, from 0 to 1, and how they are written."""
        low, high = np.log10(self.bounds)
        if low == high:
            return [(0.0, _plain(self.bounds[0]))]
        powers = range(math.floor(low), math.ceil(high) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
            values = [digit * 10.0**power for power in powers for digit in digits]
            found = [(float((np.log10(v) - low) / (high - low)), _plain(v)) for v in values]
            inside = [(at, text) for at, text in found if 0 <= at <= 1]
            if len(inside) > 1:
                break
        return inside[:: 1 + len(inside) // MAX_TICKS]

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and greatest value above 0 of all rows."""
        positive = [v for row in self.rows for v in row.values if v > 0]
        return (min(positive), max(positive)) if positive else (1.0, 1.0)

    def shape(self, row: Row) -> str:
        """The row's distribution as an SVG path, BINS wide and 1 high."""
        positive = [v for v in row.values if v > 0]
        low, high = np.log(self.bounds)
        if not positive or low == high:
            return ""
        heights = np.histogram(np.log(positive), BINS, (low, high))[0] / len(positive)
        heights /= heights.max()
        steps = "".join(f"V{1 - h:.3f}H{n}" for n, h in enumerate(heights, 1))
        return f"M0,1{steps}V1Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All of a report. Times of charts and lanes are in seconds since `origin`; `facts` say what was measured."""

    title: str
    subtitle: str
    facts: Mapping[str, Any]
    origin: float
    tiles: Sequence[Tile]
    findings: Sequence[Finding]
    charts: Sequence[Chart | Lanes]
    tables: Sequence[Table]
    numbers: dict[str, Any]

    def render(self) -> str:
        """The HTML. `numbers` is in it as JSON, in the element `report`."""
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        return environment.get_template("page.html").render(
            page=self,
            bins=BINS,
            style=Markup((_FOLDER / "page.css").read_text()),
            script=Markup(_CANVAS.read_text() + (_FOLDER / "timeline.js").read_text()),
            data=_json([self._lanes(c) if isinstance(c, Lanes) else self._chart(c) for c in self.charts]),
            report=_json(self.numbers),
        )

    def _chart(self, chart: Chart) -> dict[str, Any]:
        return {
            "kind": chart.kind,
            "unit": chart.unit,
            "starts": _rounded(np.subtract(chart.starts, self.origin)),
            "ends": _rounded(np.subtract(chart.ends, self.origin)),
            "series": [
                {"name": s.name, "colour": s.colour, "values": _rounded(np.asarray(s.values, float))}
                for s in chart.series
            ],
        }

    def _lanes(self, lanes: Lanes) -> dict[str, Any]:
        spans = sorted(lanes.spans, key=lambda span: span[1][0])
        return {
            "kind": "lanes",
            "parts": [{"name": name, "colour": colour} for name, colour in lanes.parts],
            "spans": [
                {"label": label, "lane": lane, "times": _rounded(np.subtract(times, self.origin))}
                for lane, (label, times) in zip(_pack([times for _, times in spans]), spans, strict=True)
            ],
        }


def _plain(value: float) -> str:
    """A number of the axis, in full."""
    return f"{value:,.0f}" if value >= 1 else f"{value:.6f}".rstrip("0")


def _pack(spans: Sequence[Sequence[float]]) -> list[int]:
    """The lowest free lane for each of the spans, which are in order of their beginning."""
    free_at: list[float] = []
    lanes = []
    for times in spans:
        lane = next((n for n, end in enumerate(free_at) if end <= times[0]), len(free_at))
        free_at[lane : lane + 1] = [times[-1]]
        lanes.append(lane)
    return lanes


def _rounded(values: np.ndarray[Any, np.dtype[Any]]) -> list[float]:
    """To a millionth: microseconds, where they are times."""
    return np.round(values, 6).tolist()  # type: ignore[no-any-return]


def _json(value: Any) -> Markup:
    """For a script element, which ends at `</`."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
