"""The page in a headless Chromium, over a fake engine: what one sees, by keyboard alone. Needs Debian's chromium."""

from pathlib import Path
from typing import Any

import pytest

from tests.browser import ENTER, ESCAPE, LEFT, RIGHT, TAB, Browser
from tests.rpc.fake_engine import FakeEngine, Submission
from tests.rpc.http.conftest import Http, HttpServing
from tests.rpc.http.snapshots import snapshot


async def open_page(http: Http, browser: Browser, view: str = "") -> str:
    """Its origin, once the page knows the model."""
    http.engine.current_snapshot = http.engine.current_snapshot or snapshot()
    origin = f"http://127.0.0.1:{http.served.server.http_port}"
    await browser.open(f"{origin}/{view}")
    await browser.until("#model-name", lambda text: text == "tiny")
    return origin


async def send(http: Http, browser: Browser, text: str) -> Submission:
    await browser.press(text, ENTER)
    return await http.next_request()


async def test_a_chat_by_keyboard(http: Http, browser: Browser) -> None:
    origin = await open_page(http, browser)
    assert await browser.focused() == "message"
    request = await send(http, browser, "hi <b>")
    assert "".join(map(chr, request.prompt)) == "<user>hi <b><assistant>"
    assert request.params.max_tokens == 256
    request.push("Hello <i>", [1])
    await browser.until(".turn.assistant p", lambda text: text == "Hello <i>")
    assert await browser.script("return document.getElementById('log').getAttribute('aria-busy')") == "true"
    request.push(" there", [2], num_cached_tokens=5)
    request.finish("!", [3], num_cached_tokens=5)
    await browser.until("#fact-finish", lambda text: text == "stop")
    assert await browser.text(".turn.assistant p") == "Hello <i> there!"
    assert await browser.text("#fact-cached") == "5 tokens"
    assert await browser.text("#fact-answer") == "3 tokens"
    assert (await browser.text("#fact-ttft")).endswith(" ms")
    assert (await browser.text("#fact-speed")).endswith(" tokens/s")

    second = await send(http, browser, "more")
    assert "".join(map(chr, second.prompt)) == "<user>hi <b><assistant>Hello <i> there!<user>more<assistant>"
    second.push("Once", [1])
    await browser.until(".turn:last-child p", lambda text: text == "Once")
    await browser.press(ESCAPE)
    assert await http.engine.aborts.get() == second.request_id
    await browser.until("#fact-finish", lambda text: text == "stopped by you")

    await browser.press(ESCAPE, "n")  # out of the field, then a new chat
    await browser.until("#log", lambda text: text.startswith("Write a message"))
    http.engine.refusal = ValueError("x")
    await browser.press("again", ENTER)
    await browser.until("#error", lambda text: text == "internal error: ValueError")
    assert [c for c in await browser.complaints() if "500" not in c] == []
    assert all(a.startswith(f"{origin}/") for a in await browser.requested())


MARKDOWN = """# Title

One **bold**, *slanted* and `a < b` word; 2 * 3 * 4 and snake_case_name stay.
<img src=x onerror=alert(1)>

- first
  - inner
- second

1. one
2. two

> said

```python
if a < b:
    print("*")
```"""


async def test_answers_are_markdown_and_can_be_copied(http: Http, browser: Browser) -> None:
    origin = await open_page(http, browser)
    request = await send(http, browser, "hi")
    request.push(MARKDOWN[:-10], [1])  # the fence is still open
    await browser.until(".turn.assistant pre code", lambda text: text.startswith("if a < b:"))
    request.finish(MARKDOWN[-10:], [2])
    await browser.until("#fact-finish", lambda text: text == "stop")
    html = await browser.script("return document.querySelector('.turn.assistant .markdown').innerHTML")
    assert html == (
        "<h4>Title</h4><p>One <strong>bold</strong>, <em>slanted</em> and <code>a &lt; b</code> word; "
        "2 * 3 * 4 and snake_case_name stay.\n&lt;img src=x onerror=alert(1)&gt;</p>"
        "<ul><li>first<ul><li>inner</li></ul></li><li>second</li></ul>"
        '<ol start="1"><li>one</li><li>two</li></ol><blockquote><p>said</p></blockquote>'
        '<pre><code data-language="python">if a &lt; b:\n    print("*")</code></pre>'
    )
    await browser.script(
        "navigator.clipboard.writeText = async (text) => { window.copied = text; };"
        "document.querySelector('.turn.assistant .copy').click()"
    )
    await browser.until(".turn.assistant .copy", lambda text: text == "Copied")
    assert await browser.script("return window.copied") == MARKDOWN
    assert await browser.complaints() == []
    assert all(a.startswith(f"{origin}/") for a in await browser.requested())


async def test_the_chat_needs_the_key_when_one_is_set(
    http_serving: HttpServing, browser: Browser, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-token acme\n")
    engine = FakeEngine()
    async with http_serving(engine, wait=False, api_key_file=str(keys)) as http:
        await open_page(http, browser)
        await browser.press("hi", ENTER)
        await browser.until("#error", lambda text: text.startswith("a bearer token is required"))
        await browser.script("document.getElementById('key').focus()")
        await browser.press("secret-token", ESCAPE, "/")
        request = await send(http, browser, "hi")
        assert request.tenant == "acme"
        request.finish("yes", [1])
        await browser.until(".turn:last-child p", lambda text: text == "yes")
        assert await browser.script("return localStorage.length") == 0


async def test_the_engines_picture(http: Http, browser: Browser) -> None:
    origin = await open_page(http, browser, "#engine")
    await browser.until("#tile-running", lambda text: text == "3")
    assert [await browser.text(f"#tile-{name}") for name in ("waiting", "kv", "hits")] == ["4", "25%", "36%"]
    rows = [(await browser.text(f"#rows tr:nth-child({i})")).split() for i in (1, 2, 3)]
    assert rows == [
        ["7", "acme/chatcmp…2e1f0-3", "decode", "40", "16", "50", "11"],
        ["8.1", "short", "prefill", "40", "16", "32", "0"],
        ["9", "later", "waiting", "400", "0", "0", "0"],
    ]
    assert (await browser.text("#block-legend")).split("\n") == ["in use 2", "shared 1", "cached, unused 1", "free 2"]
    note = await browser.text("#steps-note")
    assert note == "latest, step 5: 12 prefill + 3 decode tokens in 4 rows, 125.0 ms (device 62.5)"
    assert (await browser.text("#ttft-note")).startswith("p50 70 ms · p90 640 ms")
    await browser.script("document.getElementById('steps').focus()")
    await browser.press(LEFT, LEFT)
    assert await browser.text("#steps-note") == "step 4: 30 prefill + 0 decode tokens in 1 row, 250.0 ms (device 125.0)"
    await browser.assert_quiet(f"{origin}/", "data:")

    await browser.press("p")
    held = http.engine.current_snapshot = snapshot([[3] * 6])
    await browser.until("#engine-state", lambda text: text.startswith("held"))
    assert "shared 1" in await browser.text("#block-legend")
    await browser.press("p")
    await browser.until("#block-legend", lambda text: "shared 6" in text)
    assert held is not None


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_light_and_dark_can_be_read(http: Http, browser: Browser, scheme: str) -> None:
    await browser.prefer(scheme)
    await open_page(http, browser)
    (await send(http, browser, "hi")).finish("a", [1])
    await browser.until("#fact-finish", lambda text: text == "stop")
    await browser.press(ESCAPE)
    seen: list[Any] = await browser.contrasts()
    await browser.press("2")
    await browser.until("#tile-running", lambda text: text == "3")
    seen += await browser.contrasts()
    assert len(seen) > 60
    assert [(text, round(ratio, 2)) for text, ratio in seen if ratio < 4.5] == []
    ground = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 128"
    assert await browser.script(ground) is (scheme == "dark")
    await browser.press("t")
    assert await browser.script(ground) is (scheme == "light")


async def test_shortcuts_focus_and_narrow_screens(http: Http, browser: Browser) -> None:
    origin = await open_page(http, browser)
    await browser.press(ESCAPE, "?")
    assert await browser.script("return document.getElementById('shortcuts').open")
    await browser.press(ESCAPE)
    assert not await browser.script("return document.getElementById('shortcuts').open")
    await browser.press("2")
    assert await browser.focused() == "tab-engine"
    await browser.press(RIGHT)
    assert await browser.focused() == "tab-chat"
    order = []
    for _ in range(4):
        await browser.press(TAB)
        order.append(await browser.focused())
    assert order == ["theme", "help", "log", "message"]
    assert await browser.script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for view in ("1", "2"):
        await browser.press(ESCAPE, view)
        for width in (360, 768, 1280):
            await browser.resize(width, 800)
            assert await browser.script("return document.documentElement.scrollWidth <= innerWidth"), (view, width)
    await browser.assert_quiet(f"{origin}/", "data:")
