"""A headless Chromium on a page, driven from the test's event loop; every wait is for something that can be seen."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SECONDS = 20

CONTRASTS = """
const luminance = (c) => c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const rgba = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
const ground = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor);
  if (c[3] === 1) return c.slice(0, 3); } return [255, 255, 255]; };
const found = [];
for (const e of document.querySelectorAll('body *')) {
  const says = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility();
  if (!says) continue;
  const [a, b] = [luminance(rgba(getComputedStyle(e).color).slice(0, 3)), luminance(ground(e))];
  found.push([e.textContent.trim().slice(0, 40), (Math.max(a, b) + .05) / (Math.min(a, b) + .05)]);
}
return found;
"""
"""Every visible text and its contrast to the ground, as WCAG 2.2 defines it."""


class Browser:
    """One page. The driver blocks, so each call runs in a thread while the server goes on."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    async def open(self, url: str) -> None:
        await asyncio.to_thread(self._driver.get, url)

    async def script(self, code: str) -> Any:
        return await asyncio.to_thread(self._driver.execute_script, code)

    async def press(self, *keys: str) -> None:
        """Type into whatever has the focus."""
        await asyncio.to_thread(lambda: self._driver.switch_to.active_element.send_keys(*keys))

    async def text(self, selector: str) -> str:
        return await asyncio.to_thread(lambda: self._driver.find_element(By.CSS_SELECTOR, selector).text)

    async def until(self, selector: str, holds: Callable[[str], bool]) -> str:
        """The text there, as soon as it is as wanted."""
        texts = [""]

        def look(driver: webdriver.Chrome) -> bool:
            texts[0] = driver.find_element(By.CSS_SELECTOR, selector).text
            return holds(texts[0])

        waiting = WebDriverWait(self._driver, SECONDS, poll_frequency=0.05)
        try:
            await asyncio.to_thread(waiting.until, look)
        except Exception as error:
            raise AssertionError(f"{selector} says {texts[0]!r}") from error
        return texts[0]

    async def focused(self) -> str:
        """Id of what has the focus."""
        return str(await self.script("return document.activeElement.id"))

    async def reset(self) -> None:
        """A blank page of the usual size, and empty logs."""
        await self.open("about:blank")
        await self.prefer("")
        await self.resize(1280, 900)
        await self.requested()
        await self.complaints()

    async def prefer(self, scheme: str) -> None:
        """What the system would say of light and dark."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        await asyncio.to_thread(self._driver.execute_cdp_cmd, "Emulation.setEmulatedMedia", media)

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await asyncio.to_thread(self._driver.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", size)

    async def contrasts(self) -> list[tuple[str, float]]:
        return [tuple(pair) for pair in await self.script(CONTRASTS)]

    async def requested(self) -> list[str]:
        """Every address that was asked for since the last call."""
        log = await asyncio.to_thread(self._driver.get_log, "performance")
        messages = [json.loads(entry["message"])["message"] for entry in log]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    async def complaints(self) -> list[str]:
        """Errors and warnings of the console since the last call."""
        log = await asyncio.to_thread(self._driver.get_log, "browser")
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    async def assert_quiet(self, *allowed: str) -> None:
        """Nothing in the console, and nothing asked for but addresses that begin so."""
        assert await self.complaints() == []
        addresses = await self.requested()
        assert addresses
        assert [a for a in addresses if not a.startswith(allowed)] == []


@contextmanager
def chromium() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    # CI is root in a container: no sandbox there, and a small /dev/shm.
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1280,900",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


TAB, ENTER, ESCAPE = Keys.TAB, Keys.ENTER, Keys.ESCAPE
LEFT, RIGHT = Keys.ARROW_LEFT, Keys.ARROW_RIGHT
