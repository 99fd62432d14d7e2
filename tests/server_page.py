"""The server's page in a headless Chromium, while others ask: ``make test-page``.

It talks about a document, stops answers and has them go on, comes back to what the browser kept, has hostile Markdown
shown, asks a document under two policies, looks at heat-maps and selection maps, with mouse and with keys alone, light
and dark, wide and narrow. It fails on a word in the console, on something wider than the window, on a violation that
axe finds, or where the page does not show what it should. Where a folder for pictures is named they are taken instead,
of a chat with the model that $MODEL names, one that `saccade fetch` brought say.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

DOCUMENT = (
    "The secret password of the lighthouse keeper is 7391-XKQ. " + "Rain fell, and nobody spoke of the storm. " * 100
)
QUESTION = "The secret password of the lighthouse keeper is"
DOCUMENT = QUESTION + " 7391-XKQ. " + "Rain fell, and nobody spoke of the storm. " * 100
ENDLESS = "round and round we go, " * 10
HOSTILE = r"""<script>window.got = 1</script><img src=x onerror="window.got = 2"> [a](javascript:window.got=3)
[b](JaVaScRiPt&colon;window.got=4) [c](data:text/html,<script>window.got=5</script>) ![d](http://127.0.0.1:1/x.png)
<svg onload=window.got=6><a href="javascript:window.got=7">e</a> [f](http://127.0.0.1/ "x\" onmouseover=\"window.got=8")
```"><script>window.got = 9</script>
</code></pre><script>window.got = 10</script>
```
| a | <iframe src=javascript:window.got=11> |
|:--|--:|
| **b** | 2 |

1. one
   - two <https://127.0.0.1/y> `x < y`
"""
MARKED = "document.getElementById('log').append(markdown(%s))"
HARBOUR = """<!doctype html><title>The harbour</title><h1>The harbour</h1><p>The harbour opens at nine in the morning,
on Sundays at eleven. Boats of more than twelve metres lie at the north pier.<ul><li>The café is open all day.
<li>Dogs are welcome.</ul><table><tr><th>Boat</th><th>A night</th></tr><tr><td>to 8 m</td><td>12 euros</td></tr>
</table>"""
SHOTS = {("light", 1200), ("dark", 1200), ("light", 390), ("dark", 390)}


@contextmanager
def a_server(*options: str) -> Iterator[str]:
    """The command in a process of its own, with the built-in model: its address."""
    command = [os.environ.get("SACCADE", "saccade"), "serve", "--port", "0", "--selection-maps", "8192", *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stream, subprocess.Popen(command, stderr=stream) as process:
            try:
                found = None
                for _ in range(3000):
                    found = re.search(r'"address": "([^"]+)"', log.read_text())
                    if found or process.poll() is not None:
                        break
                    time.sleep(0.1)
                assert found, f"the server did not start: {log.read_text()[-2000:]}"
                yield found[1]
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()


def load(url: str, ended: threading.Event) -> None:
    """Somebody asks all the time."""
    policies = ("dense", "psa", "streaming(sinks=4, window=256)")
    number = 0
    while not ended.is_set():
        body = {"prompt": DOCUMENT[: 400 * (1 + number % 7)], "max_tokens": 30, "policy": policies[number % 3]}
        httpx.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=120)
        number += 1
        ended.wait(1)


def wait(page: Any, condition: str, seconds: float = 300) -> None:
    """Until a piece of script is true. Playwright's own way is forbidden by the page's policy."""
    ends = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < ends, condition
        page.wait_for_timeout(50)


def check(page: Any, axe: str) -> None:
    """Nothing sticks out, and axe finds nothing."""
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, "wider than the window"
    page.evaluate(axe + ";0")
    rules = "(v) => v.id + ': ' + v.nodes.map((n) => n.html.slice(0, 90)).join(' | ')"
    violations = page.evaluate(f"async () => (await axe.run()).violations.map({rules})")
    assert violations == [], violations


def visit(browser: Any, url: str, axe: str, scheme: str, width: int) -> None:
    """One visitor."""
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=False, reduced_motion="reduce"
    )
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if not request.url.startswith(url) else None)
    page.goto(url)
    talk(page, said)
    file = {"name": "a.txt", "mimeType": "text/plain", "buffer": DOCUMENT.encode()}
    page.set_input_files("#file", files=[file])
    wait(page, "document.getElementById('size').textContent.includes('tokens')")
    page.fill("#most", "12")
    page.focus("#question")
    page.keyboard.type(QUESTION)
    for _ in range(4):  # over the policies and the length, to the button
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.type") == "submit"
    page.keyboard.press("Enter")
    wait(page, "document.getElementById('verdict').textContent")
    for side in ("#talk0", "#talk1"):
        text = page.inner_text(side)
        assert "7391-XKQ" in text, text
        assert "density" in text, text
    assert "of the keys that the first one read" in page.inner_text("#verdict"), page.inner_text("#verdict")
    page.fill("#question", "And the password of the lighthouse keeper is")  # the chat goes on from what is cached
    page.click("#ask button[type=submit]")
    wait(page, "document.querySelectorAll('#talk1 table').length === 2")
    cached = int(re.findall(r"([\d,]+) cached", page.inner_text("#talk1"))[-1].replace(",", ""))
    assert cached > 1000, cached
    page.wait_for_selector("#heat svg rect")
    assert "least: layer" in page.inner_text("#heatsaid")
    page.select_option("#phase", "prefill")
    assert "prefill" in page.inner_text("#heatsaid") or "cached" in page.inner_text("#heatsaid")
    page.select_option("#phase", "decode")
    page.locator("#talk1 button").first.click()
    page.wait_for_selector("#heads canvas", timeout=300000)
    assert "of true attention" in page.inner_text("#mapsaid")
    colours = page.evaluate(
        "(() => { const c = document.querySelector('#heads canvas'); const d = c.getContext('2d').getImageData(0, 0,"
        "c.width, c.height).data; const s = new Set(); for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 |"
        "d[i + 1] << 8 | d[i + 2]); return s.size; })()"
    )
    assert colours > 3, "the map is blank"
    page.select_option("#mapphase", "decode")
    page.wait_for_selector("#heads canvas")
    page.select_option("#mapphase", "prefill")
    page.wait_for_selector("#time_to_first_token_seconds svg", state="attached")
    page.wait_for_timeout(3000)
    for name in ("#running", "#speed", "#pool", "#hits", "#density"):
        assert re.match(r"\d", page.inner_text(name)), name
    assert said == [], said
    context.close()
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    page = context.new_page()  # axe needs a script that the page's policy forbids
    page.goto(url)
    page.evaluate(MARKED % json.dumps(HOSTILE))
    page.wait_for_selector("#heat svg rect")
    page.fill("#question", QUESTION)
    page.fill("#most", "4")
    page.click("#ask button[type=submit]")
    wait(page, "document.getElementById('verdict').textContent")
    page.locator("#talk0 button").first.click()
    page.wait_for_selector("#heads canvas", timeout=300000)
    check(page, axe)
    assert page.evaluate("window.got") is None, "a model's text was run"
    context.close()


def talk(page: Any, said: list[str]) -> None:
    """Somebody talks about a document, comes back later, and has enough."""
    own = "[...document.querySelectorAll('#chats .open')].map((one) => one.textContent)"
    page.click(".settings summary")
    page.fill("#heatness", "0")
    page.set_input_files("#papers", files=[{"name": "a.rtf", "mimeType": "text/rtf", "buffer": b"{\\rtf1 x}"}])
    wait(page, "document.getElementById('chatsaid').textContent.includes('pandoc')")
    assert "\n" not in page.inner_text("#chatsaid")
    assert [text for text in said if "400" not in text] == []  # of the refused document, which Chromium tells of
    said.clear()
    html = f"<!doctype html><title>no</title><p>{DOCUMENT}"
    page.set_input_files("#papers", files=[{"name": "a.html", "mimeType": "text/html", "buffer": html.encode()}])
    wait(page, "document.getElementById('attached').textContent.includes('tokens')")
    page.fill("#limit", "12")
    page.focus("#message")
    page.keyboard.type("Please:")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    wait(page, "document.getElementById('log').textContent.includes('cut after 12 tokens')")
    assert "7391-XKQ" in page.inner_text("#log .theirs"), page.inner_text("#log")
    assert f"Please:\n{QUESTION}" in page.inner_text("#log .mine .said")
    assert "a.html" in page.inner_text("#log .mine .paper")
    assert page.evaluate("document.activeElement.id") == "message"
    page.fill("#limit", "5")
    page.fill("#message", "And the password of the lighthouse keeper is")
    page.click("#send")
    wait(page, "document.getElementById('log').textContent.includes('cut after 5 tokens')")
    assert "kept from before" in page.inner_text("#log .theirs:last-child")
    before = page.inner_text("#log .theirs:last-child .body")
    page.fill("#limit", "8")
    page.get_by_role("button", name="Let this answer go on").click()
    wait(page, "document.querySelector('#log .theirs:last-child .end').textContent.includes('cut after 8 tokens')")
    assert page.inner_text("#log .theirs:last-child .body").startswith(before)
    assert "7391-XKQ" in page.inner_text("#log .theirs:last-child .body"), page.inner_text("#log")
    shown = page.inner_text("#log")
    if not page.is_visible("#newchat"):  # closed where there is little room
        page.click("#chatlist summary")
    page.click("#newchat")
    assert page.inner_text("#log") == ""
    page.click(".settings summary") if not page.is_visible("#limit") else None
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    wait(page, "document.getElementById('chatsaid').textContent === 'The answer is complete.'")
    assert "(the model said nothing)" in page.inner_text("#log")
    page.fill("#limit", "20000")
    page.fill("#heatness", "0")
    page.fill("#message", ENDLESS)
    page.press("#message", "Enter")
    wait(page, "document.querySelector('#log .theirs:last-child .body').textContent.length > 60")
    page.click("#halt")
    wait(page, "document.getElementById('log').textContent.includes('stopped; what was said stays')")
    stopped = page.inner_text("#log .theirs:last-child .body")
    assert len(stopped) > 50, stopped
    page.reload()  # all of it is kept
    wait(page, "document.querySelectorAll('#chats li').length === 2")
    assert page.inner_text("#log .theirs:last-child .body") == stopped
    assert "stopped; what was said stays" in page.inner_text("#log")
    titles = page.evaluate(own)
    if not page.is_visible("#chats"):
        page.click("#chatlist summary")
    page.click(f"#chats .open >> text={titles[1]}")
    assert page.inner_text("#log").replace("Selection map", "") == shown.replace("Selection map", "")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#chats li:first-child .gone")
    wait(page, "document.querySelectorAll('#chats li').length === 1")
    hostile(page)
    page.reload()


def hostile(page: Any) -> None:
    """What a model writes is shown, and nothing of it is run or fetched."""
    page.evaluate(MARKED % json.dumps(HOSTILE))
    found = "(() => { const log = document.getElementById('log'); return [...log.querySelectorAll('*')].map((one) =>"
    found += "[one.localName, [...one.attributes].map((each) => each.name + '=' + each.value)]); })()"
    names = {name for name, _ in page.evaluate(found)}
    assert not names & {"script", "img", "svg", "iframe", "style", "object", "form", "link", "base"}, names
    assert {"pre", "code", "table", "th", "td", "strong", "ol", "ul", "li", "a"} <= names, names
    for name, attributes in page.evaluate(found):
        for one in attributes:
            assert not one.startswith(("on", "style=", "srcdoc=")), (name, one)
            if one.startswith("href="):
                assert one.startswith(("href=http://127.0.0.1", "href=https://127.0.0.1")), (name, one)
    assert page.evaluate("window.got") is None


def portray(browser: Any, url: str, scheme: str, width: int, pictures: Path) -> None:
    """A picture of a chat with a real model, as the page opens."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900 if width > 600 else 1100})
    page.goto(url)
    page.click(".settings summary")
    page.fill("#heatness", "0")
    page.fill("#limit", "160")
    page.click(".settings summary")
    file = {"name": "harbour.html", "mimeType": "text/html", "buffer": HARBOUR.encode()}
    page.set_input_files("#papers", files=[file])
    wait(page, "document.getElementById('attached').textContent.includes('tokens')")
    for question in ("When does the harbour open?", "Write a Python function that adds two numbers, in a code block."):
        page.fill("#message", question)
        page.press("#message", "Enter")
        wait(page, "document.getElementById('chatsaid').textContent.startsWith('The answer')")
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(300)
    shoot(page, pictures / f"page-{scheme}-{'desktop' if width > 600 else 'phone'}.png")
    page.close()


def shoot(page: Any, path: Path) -> None:
    """A picture of what the window shows, small."""
    from io import BytesIO

    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(48)
    picture.save(path, "PNG", optimize=True)


def key_is_asked_for(browser: Any, url: str) -> None:
    """A server with keys: the page says so, and works once it has one."""
    page = browser.new_page()
    page.goto(url)
    wait(page, "document.getElementById('model').textContent.includes('API key')")
    page.fill("#key", os.environ["SACCADE_API_KEY"])
    wait(page, "document.getElementById('model').textContent.includes('by default')")
    page.close()


def main(axe: str, pictures: str | None) -> None:
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "there is no Chromium; install Debian's, or name one in CHROMIUM"
    ended = threading.Event()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        if pictures is not None:
            with a_server("--model", os.environ.get("MODEL", "retriever")) as url:
                for scheme, width in sorted(SHOTS):
                    portray(browser, url, scheme, width, Path(pictures))
            browser.close()
            return
        with a_server() as url:
            others = threading.Thread(target=load, args=(url, ended))
            others.start()
            try:
                for scheme in ("light", "dark"):
                    for width in (1200, 390):
                        visit(browser, url, Path(axe).read_text(), scheme, width)
                        print(f"{scheme}, {width} pixels: answers, maps and axe as they should be", flush=True)
            finally:
                ended.set()
                others.join()
        os.environ["SACCADE_API_KEY"] = "a-key-of-the-page"
        with a_server() as url:
            key_is_asked_for(browser, url)
        browser.close()
    print("no word in the console, nothing from elsewhere, no violation")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
