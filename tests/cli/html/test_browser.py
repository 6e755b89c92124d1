"""Pages in a headless Chromium: their script, by keyboard and mouse, light and dark. Needs Debian's chromium."""

from pathlib import Path

import pytest

from engine.cli.html.page import Chart, Page, Series
from tests.browser import ESCAPE, RIGHT, Browser
from tests.cli.html.test_page import page
from tests.cli.profile.test_page import render
from tests.rpc.fake_engine import profile

ITSELF = ("file:", "data:", "about:")
"""What a page in a file may ask for."""

DRAG = """
const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
const send = (kind, part) => canvas.dispatchEvent(new PointerEvent(kind, {
  clientX: box.left + 66 + part * (box.width - 90), clientY: box.top + 50, pointerId: 1, bubbles: true }));
canvas.setPointerCapture = () => {};
send("pointerdown", 0.25); send("pointermove", 0.4); send("pointerup", 0.5); send("lostpointercapture", 0.5);
"""
"""From a quarter of the first chart's plot to its middle; 66 and 24 pixels beside it are axes."""

MISSING = """
return [...document.querySelectorAll("figure:has(canvas)")].flatMap((figure) => {
  const canvas = figure.querySelector("canvas");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const drawn = new Set();
  for (let i = 0; i < pixels.length; i += 4) drawn.add(`rgb(${pixels[i]}, ${pixels[i + 1]}, ${pixels[i + 2]})`);
  return [...figure.querySelectorAll(".legend li")]
    .filter((item) => !drawn.has(getComputedStyle(item.firstChild).backgroundColor))
    .map((item) => item.textContent);
});
"""
"""Names in the legends of charts in which their colour is nowhere."""


COLUMNS_OF_C1 = """
const canvas = document.querySelector("canvas"), probe = document.querySelector(".legend .c1");
const wanted = getComputedStyle(probe).backgroundColor;
const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
let count = 0;
for (let x = 0; x < width; x++)
  for (let y = 0; y < height; y++) {
    const i = 4 * (y * width + x);
    if (`rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})` === wanted && data[i + 3] === 255) { count++; break; }
  }
return count;
"""
"""Columns of pixels in which the first chart has its first series."""

INK_AT_THE_LEFT = """
const canvas = document.querySelector("canvas");
const { data } = canvas.getContext("2d").getImageData(0, 0, 1, canvas.height);
let count = 0;
for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
return count;
"""
"""Pixels in the canvas's first column: a text that does not fit ends there."""


async def opened(browser: Browser, html: str, folder: Path) -> str:
    """The range of time that the page shows first."""
    file = folder / "page.html"
    file.write_text(html)
    await browser.open(file.as_uri())
    return await browser.text("#range")


async def test_a_profile_opens_without_a_complaint(browser: Browser, tmp_path: Path) -> None:
    _, html = render(profile(40, "a", "b"))
    assert await opened(browser, html, tmp_path) == "0.00000 s to 0.04000 s"
    # Its steps compute no prompts, and its requests were not queued.
    assert await browser.script(MISSING) == ["prefill", "queued"]
    await browser.assert_quiet(*ITSELF)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_charts_are_in_the_colours_of_their_legends(browser: Browser, tmp_path: Path, scheme: str) -> None:
    await browser.prefer(scheme)
    await opened(browser, page().render(), tmp_path)
    assert await browser.script(MISSING) == []
    await browser.prefer("light" if scheme == "dark" else "dark")
    await browser.press("0")
    assert await browser.script(MISSING) == []


async def test_zooming_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    assert await opened(browser, page().render(), tmp_path) == "0.000 s to 4.000 s"
    for key, shown in (("+", "1.000 s to 3.000 s"), (RIGHT, "1.400 s to 3.400 s"), ("-", "0.000 s to 4.000 s")):
        await browser.press(key)
        assert await browser.text("#range") == shown
    await browser.press("+")
    await browser.press(ESCAPE)
    assert await browser.text("#range") == "0.000 s to 4.000 s"
    await browser.assert_quiet(*ITSELF)


async def test_zooming_by_dragging(browser: Browser, tmp_path: Path) -> None:
    await opened(browser, page().render(), tmp_path)
    await browser.script(DRAG)
    assert await browser.text("#range") == "1.000 s to 2.000 s"
    await browser.script("document.getElementById('reset').click()")
    assert await browser.text("#range") == "0.000 s to 4.000 s"
    await browser.assert_quiet(*ITSELF)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_can_be_read(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """WCAG 2.2 asks for a contrast of 4.5."""
    await browser.prefer(scheme)
    await opened(browser, page().render(), tmp_path)
    assert [pair for pair in await browser.contrasts() if pair[1] < 4.5] == []


@pytest.mark.parametrize("width", [500, 700, 1200])  # headless Chromium has no narrower window than 500
async def test_a_page_fits_its_window(browser: Browser, tmp_path: Path, width: int) -> None:
    """And its tables fit their cards, where they scroll."""
    await browser.resize(width, 900)
    await opened(browser, render(profile(40, "a"))[1], tmp_path)
    shown = await browser.script("return innerWidth")
    assert await browser.script("return document.documentElement.scrollWidth") <= shown
    right = "return Math.max(...[...document.querySelectorAll('figure')].map((f) => f.getBoundingClientRect().right))"
    assert await browser.script(right) <= shown


async def test_a_step_that_is_wider_than_a_column_has_its_width(browser: Browser, tmp_path: Path) -> None:
    """A long one behind a short one that begins in the same column of the screen was one pixel wide."""
    starts, ends = [0.0, 0.0001, 1.0], [0.0001, 0.5, 1.0001]
    chart = Chart("bars", "bars", "note", "ms", starts, ends, [Series("step", "c1", [9, 5, 1])])
    await browser.resize(700, 900)
    await opened(browser, page(origin=0.0, charts=[chart]).render(), tmp_path)
    assert await browser.script(COLUMNS_OF_C1) > 100


async def test_units_and_numbers_of_axes_are_not_cut(browser: Browser, tmp_path: Path) -> None:
    chart = Chart("bars", "bars", "note", "tokens/s", [0.0], [1.0], [Series("step", "c1", [1_234_567])])
    await opened(browser, page(origin=0.0, charts=[chart]).render(), tmp_path)
    assert await browser.script(INK_AT_THE_LEFT) == 0


async def test_without_charts_there_is_no_script_to_fail(browser: Browser, tmp_path: Path) -> None:
    empty: Page = page(charts=[])
    file = tmp_path / "page.html"
    file.write_text(empty.render())
    await browser.open(file.as_uri())
    await browser.assert_quiet(*ITSELF)
