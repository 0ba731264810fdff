"""What the tests of the web page share: a browser, a page that tells of every mistake, and what a reader does."""

import json
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serve_parts import Served
from watched import WAIT_S

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 1000 * WAIT_S
LASTING_S = 0.3  # a step of an answer that must not end before the browser has acted: 400 tokens last for WAIT_S

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed; on Debian: apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test for any error in a script, and for any request to another host."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"script: {error}"))
    # A refusal that a test wants is logged, too, but not by a script; and so is a server that has gone.
    wanted = (" status of 4", " status of 503", "net::ERR_CONNECTION_REFUSED", "net::ERR_FAILED")
    page.on(
        "console",
        lambda m: problems.append(m.text) if m.type == "error" and not any(w in m.text for w in wanted) else None,
    )
    page.on("request", lambda r: None if r.url.startswith("http://127.0.0.1:") else problems.append(f"to {r.url}"))
    yield page
    context.close()
    assert not problems, problems


def open_page(page: Page, parts: Served) -> None:
    page.goto(f"{parts.http_url}/")
    expect(page.locator("#state")).to_have_attribute("data-state", "live")


def show(page: Page, view: str) -> None:
    """ "chat", "engine", or "both" where the screen is wide."""
    page.click(f"#tab-{view}")
    expect(page.locator(f"#tab-{view}")).to_have_attribute("aria-selected", "true")


def ask_page(page: Page, text: str, max_tokens: int = 5) -> None:
    page.locator("#max_tokens").evaluate("(field, value) => { field.value = value; }", str(max_tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def piece(text: str, reason: str | None = None, **delta: str) -> dict[str, object]:
    """A chunk of an answer."""
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 60, "total_tokens": 100}}


def answer_page(page: Page, *events: object) -> None:
    """What the model says from now on."""
    body = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda r: r.fulfill(body=body, content_type="text/event-stream"))


def say(page: Page, text: str) -> None:
    """The model says this, and all of it."""
    answer_page(page, piece(text, "stop"), "[DONE]")
