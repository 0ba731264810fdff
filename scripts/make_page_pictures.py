"""Writes docs/web-page/*.png, pictures of the web page: python scripts/make_page_pictures.py

Needs an installed Chromium. The page is served by the demo model, which knows little but sums; to show more, a longer
answer is put in its place in the first three of them. All others show what the server sent.
"""

import argparse
import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "web-page"
WAIT_MS = 180_000
THOUGHT = "The reader wants a rule for any two numbers, and an example. A table of the steps is short."
ANSWER = """To add two numbers by hand, write them **below each other** and work from the right:

| step | digits | sum | carry |
|:-----|:------:|----:|------:|
| ones | 3 + 4 | 7 | 0 |
| tens | 8 + 8 | 16 | 1 |
| hundreds | 6 + 7 + 1 | 14 | 1 |

So `683 + 784` is **1467**. The same in Python:

```python
def add(a: str, b: str) -> str:
    carry, digits = 0, []
    for x, y in zip(reversed(a), reversed(b), strict=True):
        carry, digit = divmod(int(x) + int(y) + carry, 10)
        digits.append(str(digit))
    return "".join(reversed([*digits, str(carry)]))
```
"""


def main() -> None:
    """Starts the server, takes the pictures, ends the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    options = parser.parse_args()
    TARGET.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    settings = (f"serve.http.port={port}", "serve.grpc.port=null")
    command = [sys.executable, "-m", "jaxserve.run", "--config", "configs/demo.yaml"]
    server = subprocess.Popen([*command, *(part for setting in settings for part in ("--set", setting))], cwd=ROOT)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.set_default_timeout(WAIT_MS)
            expect.set_options(timeout=WAIT_MS)
            _wait_for(url, server)
            page.goto(url)
            _canned(page)
            _under_load(page, url)
            _beyond_context(page)
            server.send_signal(signal.SIGTERM)
            server.wait()
            _dead(page)
            browser.close()
    finally:
        server.kill()
        server.wait()


def _canned(page: Page) -> None:
    """The longer answer, on a laptop, on a phone and on a screen of four thousand pixels."""
    usage = {"prompt_tokens": 48, "completion_tokens": 262, "total_tokens": 310}
    chunks = [
        {"choices": [{"delta": {"reasoning_content": THOUGHT}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": ANSWER}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda r: r.fulfill(body=body, content_type="text/event-stream"))
    for question in ("Which sums can you do?", "How do I add 683 and 784 by hand?"):
        page.click("#new-chat")
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        expect(page.locator(".messages .facts")).to_have_count(1)
    page.unroute("**/v1/chat/completions")


def _under_load(page: Page, url: str) -> None:
    """Takes these pictures while 12 others are served."""
    ended = threading.Event()

    def load(number: int) -> None:
        body = {
            "model": "demo",
            "prompt": f"{number}+{number}=",
            "max_tokens": 60,
            "ignore_eos": True,
            "temperature": 1,
        }
        while not ended.is_set():
            httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_MS / 1000)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(100, 112)]
    for thread in threads:
        thread.start()
    try:
        page.click("#tab-both")
        page.wait_for_timeout(15_000)  # a part of a minute of the live view
        _to_start(page)
        _shoot(page, "laptop")
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 3840, "height": 2160})
        _to_start(page)
        page.wait_for_timeout(2_000)
        _shoot(page, "4k", width=1440)
        page.set_viewport_size({"width": 320, "height": 640})
        if page.get_attribute("#chats-toggle", "aria-expanded") == "true":
            page.click("#chats-toggle")
        page.locator(".messages").evaluate("(list) => { list.scrollTop = 330; }")
        page.evaluate("scrollTo(0, 0)")
        _shoot(page, "phone")
        page.click("#chats-toggle")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1024, "height": 640})


def _beyond_context(page: Page) -> None:
    """Asks sums until nothing fits any more, and leaves out the older half."""
    page.click("#tab-chat")
    page.click("#new-chat")
    error, facts = page.locator("#chat-error"), page.locator(".messages .facts")
    while not error.is_visible():
        before = facts.count()
        page.fill("#prompt", "What is " + " + ".join(["683+784"] * 8) + "?")
        page.press("#prompt", "Enter")
        page.wait_for_function(
            """(before) => !document.getElementById("chat-error").hidden
                || (document.getElementById("stop").hidden && document.querySelectorAll(".facts").length > before)""",
            arg=before,
        )
    _shoot(page, "beyond-context")
    page.click("#leave-out")
    expect(page.locator("#stop")).to_be_hidden()
    page.locator(".messages .cut").scroll_into_view_if_needed()
    _shoot(page, "left-out")


def _dead(page: Page) -> None:
    page.click("#new-chat")
    page.fill("#prompt", "Is anybody there?")
    page.press("#prompt", "Enter")
    expect(page.locator("#chat-error")).to_be_visible()
    expect(page.locator("#state-text")).to_have_text("the server does not answer")
    _shoot(page, "dead-server")


def _to_start(page: Page) -> None:
    page.locator(".messages").evaluate("(list) => { list.scrollTop = 0; }")


def _shoot(page: Page, name: str, width: int | None = None) -> None:
    """A picture of 256 colours, which takes half the space."""
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    if width is not None:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    image.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        TARGET / f"{name}.png", optimize=True
    )


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Compiles for a minute where nothing is cached."""
    with httpx.Client() as client:
        while server.poll() is None:
            try:
                if client.get(f"{url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            threading.Event().wait(0.5)
    raise SystemExit(f"the server ended with {server.returncode}")


if __name__ == "__main__":
    main()
