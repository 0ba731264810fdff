"""The web page in a real browser, against a real server: chat streams, the live view follows, keys work, nothing leaks.

Skipped where no Chromium is installed (Debian: apt-get install chromium); the reason says so.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from serve_parts import IdleStore, Parts, Served, served
from watched import WAIT_S, ask, until, until_idle, watched

from jaxserve.api import SamplingParams
from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.engine import EngineGroup
from jaxserve.routing import RouterOptions, create_router
from jaxserve.sched.plan import HostSlots
from jaxserve.testing import ByteTokenizer

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

pytestmark = pytest.mark.skipif(
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
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"script: {error}"))
    # A refusal that a test wants is logged, too, but not by a script; and so is a server that has gone.
    wanted = (" status of 4", "net::ERR_CONNECTION_REFUSED", "net::ERR_FAILED")
    page.on(
        "console",
        lambda m: problems.append(m.text) if m.type == "error" and not any(w in m.text for w in wanted) else None,
    )
    page.on("request", lambda r: None if r.url.startswith("http://127.0.0.1:") else problems.append(f"to {r.url}"))
    yield page
    page.close()
    assert not problems, problems


def _open(page: Page, parts: Served) -> None:
    page.goto(f"{parts.http_url}/")
    expect(page.locator("#state")).to_have_attribute("data-state", "live")


def _ask(page: Page, text: str, max_tokens: int = 5) -> None:
    page.locator("#max_tokens").evaluate("(field, value) => { field.value = value; }", str(max_tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def _colours(page: Page, canvas: str) -> set[str]:
    """The names of the style sheet's colours that a canvas shows."""
    return set(
        page.evaluate(
            """(id) => {
                const style = getComputedStyle(document.documentElement);
                const canvas = document.getElementById(id), context = canvas.getContext("2d");
                const probe = document.createElement("canvas").getContext("2d");
                const names = new Map();
                for (const name of ["free", "cached", "used", "shared", "decode", "prefill", "dots"]) {
                    probe.fillStyle = style.getPropertyValue(`--${name}`).trim();
                    const value = Number(`0x${probe.fillStyle.slice(1)}`);
                    names.set(value, [...(names.get(value) ?? []), name]);
                }
                const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
                const seen = new Set();
                for (let i = 0; i < data.length; i += 4) {
                    if (data[i + 3] !== 255) continue;
                    const found = names.get(data[i] * 65536 + data[i + 1] * 256 + data[i + 2]);
                    for (const name of found ?? []) seen.add(name);
                }
                return [...seen];
            }""",
            canvas,
        )
    )


def test_chat_streams_and_remembers(page: Page) -> None:
    with watched() as parts:
        _open(page, parts)
        parts.runner.hold(after=4)
        _ask(page, "hi", max_tokens=12)
        answer = page.locator(".messages .assistant .text")
        expect(answer).not_to_be_empty()
        lengths = [0]
        while len(lengths) < 4:  # it grows in several steps
            until(lambda: len(answer.text_content() or "") > lengths[-1], "more of the answer")
            lengths.append(len(answer.text_content() or ""))
            parts.runner.hold(after=2)
        parts.runner.release()
        expect(page.locator(".messages .facts")).to_contain_text("12 tokens")
        expect(page.locator(".messages .facts")).to_contain_text("cut at max_tokens")
        _ask(page, "and now?")
        expect(page.locator(".messages .facts")).to_have_count(2)
        names = "performance.getEntriesByType('resource').map((e) => e.name)"
        until(lambda: sum(url.endswith("/chat/completions") for url in page.evaluate(names)) == 2, "two whole streams")
        expect(page.locator(".messages .user")).to_have_text(["hi", "and now?"])
        page.click("#clear")
        expect(page.locator(".messages li")).to_have_count(0)


def test_stop_ends_the_request_and_frees_its_pages(page: Page) -> None:
    with watched(delay_s=LASTING_S) as parts:
        _open(page, parts)
        _ask(page, "go", max_tokens=400)
        expect(page.locator(".messages .assistant .text")).not_to_be_empty()
        page.click("#stop")
        until(lambda: parts.engine.num_live == 0 and parts.scheduler.num_held_pages == 0, "free pages")
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator("#stop")).to_be_hidden()


MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b>"


def _piece(text: str, reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}


def _answer(page: Page, *events: object) -> None:
    """What the model says from now on."""
    body = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    page.route("**/v1/chat/completions", lambda r: r.fulfill(body=body, content_type="text/event-stream"))


def _reconnect(page: Page) -> None:
    """What a new key does."""
    page.locator("#key-form").dispatch_event("submit")


def test_a_chat_asks_for_what_fits(page: Page) -> None:
    """A fixed number of tokens would end every conversation at that distance from the end of the context."""
    with watched() as parts:
        _open(page, parts)
        page.fill("#prompt", "hi")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.press("#prompt", "Enter")
        assert "max_tokens" not in asked.value.post_data_json
        expect(page.locator(".messages .facts")).to_contain_text("cut: the context is full")
        expect(page.locator(".messages .facts")).to_contain_text("tokens/s")


def test_few_tokens_have_no_rate(page: Page) -> None:
    """A rate of five tokens is noise."""
    with watched() as parts:
        _open(page, parts)
        _ask(page, "hi", max_tokens=5)
        facts = page.locator(".messages .facts")
        expect(facts).to_contain_text("5 tokens")
        expect(facts).not_to_contain_text("tokens/s")


def test_the_context_fills_up(page: Page) -> None:
    with watched() as parts:
        _open(page, parts)
        expect(page.locator("#context")).to_be_hidden()
        used = []
        for count in (1, 2):
            _ask(page, "hi", max_tokens=5)
            expect(page.locator(".messages .facts")).to_have_count(count)
            expect(page.get_by_role("meter", name="Context used")).to_be_visible()
            used.append(page.locator("#context-meter").evaluate("(meter) => meter.value"))
            expect(page.locator("#context-text")).to_have_text(f"{used[-1]} of 512 tokens")
        assert len("hi") + 5 < used[0] < used[1]
        assert page.locator("#context-meter").evaluate("(meter) => meter.max") == 512
        page.click("#clear")
        expect(page.locator("#context")).to_be_hidden()


def test_a_server_that_has_gone_is_named_in_the_chat(page: Page) -> None:
    """In words of the page, not of a browser ("Failed to fetch")."""
    with watched() as parts:
        _open(page, parts)
    _ask(page, "hi")
    expect(page.locator("#chat-error")).to_have_text("the server does not answer")
    expect(page.locator("#prompt")).to_have_value("hi")


def test_axes_of_few_values(page: Page) -> None:
    with watched() as parts:
        _open(page, parts)
        drawn = page.evaluate(
            """async () => {
              const { drawTimes, duration } = await import("/static/draw.js");
              const said = [], canvas = document.getElementById("ttft"), context = canvas.getContext("2d");
              const real = context.fillText.bind(context);
              context.fillText = (text, ...place) => { said.push(text); real(text, ...place); };
              drawTimes(canvas, [[1, 2.2], [2, 174]], 10, 60000);
              context.fillText = real;
              return { said, labels: [25, 12.5, 174.4, 3.456, 1500, 0.125, 0.0125, 0].map(duration) };
            }"""
        )
        assert drawn["said"][:3] == ["0 ms", "100 ms", "200 ms"], "the larger one is no rare exception"
        labels = ["25 ms", "12.5 ms", "174 ms", "3.46 ms", "1.5 s", "0.125 ms", "0.0125 ms", "0 ms"]
        assert drawn["labels"] == labels


def test_no_text_is_ever_markup(page: Page) -> None:
    """A user's, a model's, an error's, and the name of the model."""
    with watched() as parts:
        _open(page, parts)
        _answer(page, _piece(MARKUP, MARKUP), "[DONE]")
        _ask(page, MARKUP)
        expect(page.locator(".messages .assistant .text")).to_have_text(MARKUP)
        expect(page.locator(".messages .user")).to_have_text(MARKUP)
        _answer(page, {"error": {"message": MARKUP}})
        _ask(page, "and?")
        expect(page.locator("#chat-error")).to_have_text(MARKUP)
        page.route("**/events", lambda r: r.fulfill(status=429, json={"error": {"message": MARKUP}}))
        _reconnect(page)
        expect(page.locator("#state-text")).to_have_text(MARKUP)
        assert page.locator("main img, main script, main b, #state img").count() == 0


def test_half_an_answer_is_kept_and_said_to_be_half(page: Page) -> None:
    with watched() as parts:
        _open(page, parts)
        _answer(page, _piece("once upon"))
        _ask(page, "tell")
        expect(page.locator("#chat-error")).to_contain_text("ended before the answer did")
        expect(page.locator(".messages .assistant .text")).to_have_text("once upon")
        _answer(page, _piece(" a time", "stop"), "[DONE]")
        with page.expect_request("**/v1/chat/completions") as request:
            _ask(page, "go on")
        roles = [(m["role"], m["content"]) for m in request.value.post_data_json["messages"]]
        assert roles == [("user", "tell"), ("assistant", "once upon"), ("user", "go on")]
        expect(page.locator(".messages .facts")).to_have_count(1)
        expect(page.locator("#chat-error")).to_be_hidden()


def test_a_wrong_setting_is_shown_even_when_folded_away(page: Page) -> None:
    with watched() as parts:
        _open(page, parts)
        page.locator("#temperature").evaluate("(field) => { field.value = '7'; }")
        expect(page.locator("#temperature")).to_be_hidden()
        page.fill("#prompt", "hi")
        page.press("#prompt", "Enter")
        expect(page.locator("#temperature")).to_be_focused()
        check = "(field, value) => { field.value = value; return field.checkValidity(); }"
        assert [page.locator("#top_p").evaluate(check, value) for value in ("0.92", "1.5")] == [True, False]


def test_chat_by_keyboard_alone(page: Page) -> None:
    with watched(delay_s=LASTING_S) as parts:
        _open(page, parts)
        page.locator("#max_tokens").evaluate("(field) => { field.value = '400'; }")
        page.focus("#prompt")
        page.keyboard.type("go")
        while page.evaluate("document.activeElement.id") != "send":
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#stop")).to_be_focused()
        expect(page.locator(".messages .assistant .text")).not_to_be_empty()
        assert page.locator(".messages .assistant").get_attribute("aria-busy") == "true"
        page.keyboard.press("Enter")
        expect(page.locator("#send")).to_be_focused()
        expect(page.locator(".messages [aria-busy]")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(browser: Browser, scheme: Literal["light", "dark"]) -> None:
    with watched() as parts:
        page = browser.new_page(viewport={"width": 375, "height": 700}, color_scheme=scheme)
        _open(page, parts)
        ask(parts, max_tokens=20)
        _ask(page, "a_word_without_any_space_" * 10)
        expect(page.locator(".messages .facts")).to_have_count(1)
        page.locator("details").evaluate("(element) => { element.open = true; }")
        sizes = page.evaluate(
            """() => [...document.querySelectorAll("input, textarea, select")].map((e) =>
                [e.id, getComputedStyle(e).fontSize])"""
        )
        assert len(sizes) >= 7 and {size for _, size in sizes} == {"16px"}, sizes
        expect(page.locator("#context")).to_be_visible()
        too_wide = page.evaluate(
            """() => [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() &&
                !e.matches(".skip, .hidden") && e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML)"""
        )
        assert too_wide == []
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        page.close()


def test_several_replicas_and_one_that_dies(page: Page) -> None:
    parts, second = Served(tokenizer=ByteTokenizer()), Parts(tokenizer=ByteTokenizer())
    first = parts.engine
    router = create_router("least_load", RouterOptions(slack=8, table_blocks=16, seed=0))
    parts.engine = EngineGroup([first, second.engine], router)  # pyright: ignore[reportAttributeAccessIssue]
    with served(parts, grpc_config=GrpcConfig(), http_config=HttpConfig(port=0)):
        _open(page, parts)
        menu = page.locator("#replica")
        expect(menu.locator("option")).to_have_text(["0", "1"])
        second.engine.submit(
            second.engine.prepare("abc", SamplingParams(max_tokens=300, ignore_eos=True)), lambda update: None
        )
        menu.select_option(index=1)
        expect(page.locator("#step-now")).to_contain_text("latest")
        second.engine.interrupt(RuntimeError("the device is lost"))
        expect(page.locator("#state-text")).to_have_text("1 of 2 replicas dead")
        expect(menu.locator("option")).to_have_text(["0", "1, dead"])
        expect(page.locator("#pool-legend")).to_contain_text("0 used")
        _ask(page, "hi")  # the other one answers
        expect(page.locator(".messages .facts")).to_have_count(1)


def test_a_server_that_falls_silent_is_not_live(page: Page) -> None:
    with watched() as parts:
        page.clock.install()
        _open(page, parts)
        held: list[Route] = []  # taken, never answered
        page.route("**/events", lambda route: held.append(route))
        with page.expect_request("**/events"):
            _reconnect(page)
        page.clock.fast_forward(15_000)
        expect(page.locator("#state-text")).to_have_text("the server has fallen silent")
        for route in held:
            route.abort()
        page.unroute("**/events")
        page.clock.fast_forward(15_000)
        expect(page.locator("#state")).to_have_attribute("data-state", "live")


def test_a_drain_is_told_until_the_end(page: Page) -> None:
    with watched(drain_s=60.0) as parts:
        _open(page, parts)
        parts.runner.hold()
        ask(parts, max_tokens=3)
        until(lambda: parts.runner.is_held, "work")
        parts.request_shutdown()
        expect(page.locator("#state-text")).to_have_text("draining: no new requests")
        page.wait_for_timeout(300)  # for the end of the stream of events
        expect(page.locator("#state-text")).to_have_text("draining: no new requests")
        parts.runner.release()
        assert parts.wait_for_exit() == 0
        expect(page.locator("#state-text")).to_have_text("the server does not answer")


def test_errors_are_shown_and_the_question_is_kept(page: Page) -> None:
    with watched() as parts:
        _open(page, parts)
        page.fill("#prompt", "x" * 3)
        page.locator("#max_tokens").evaluate("(field) => { field.value = '100000'; }")
        with page.expect_response("**/v1/chat/completions") as response:
            page.press("#prompt", "Enter")
        assert response.value.status == 400
        expect(page.locator("#chat-error")).to_contain_text("max_tokens")
        expect(page.locator("#prompt")).to_have_value("xxx")
        expect(page.locator(".messages .assistant")).to_have_count(0)


def test_a_key_is_asked_for_and_used(page: Page, tmp_path: Path) -> None:
    with watched(tmp_path) as parts:
        page.goto(f"{parts.http_url}/")
        expect(page.locator("#state-text")).to_have_text("an API key is needed")
        expect(page.locator(".live .nothing")).to_be_visible()
        frames = page.locator("figure")
        assert [frame.is_visible() for frame in frames.all()] == [False] * 4, "there is nothing in them"
        page.fill("#key", "right-key")  # the field is there now
        page.press("#key", "Enter")
        expect(page.locator("#state")).to_have_attribute("data-state", "live")
        expect(page.locator(".live .nothing")).to_be_hidden()
        assert [frame.is_visible() for frame in frames.all()] == [True] * 4
        until(lambda: _colours(page, "pool") == {"free"}, "the pool is drawn")
        _ask(page, "hi")
        expect(page.locator(".messages .facts")).to_have_count(1)
        assert "right-key" not in page.url
        page.reload()  # the tab keeps it
        expect(page.locator("#state")).to_have_attribute("data-state", "live")


def test_the_live_view_draws_what_the_engine_does(page: Page) -> None:
    slots = HostSlots(num_slots=8, max_draining=8, max_loads=8)
    with watched(delay_s=LASTING_S, slots=slots, store=IdleStore()) as parts:
        ask(parts, "abcdefghijklmnopqrstuvw", max_tokens=4)
        until_idle(parts)  # leaves pages in the cache
        _open(page, parts)
        until(lambda: _colours(page, "pool") == {"free", "cached"}, "an idle pool")
        ask(parts, "zyxwvutsrqponmlkjihgf", max_tokens=400, n=3)
        ask(parts, "0123456789" * 9, max_tokens=400)
        until(lambda: {"free", "cached", "used", "shared"} <= _colours(page, "pool"), "all four states")
        until(lambda: {"decode", "prefill"} <= _colours(page, "steps"), "decode and prefill rows")
        until(lambda: "dots" in _colours(page, "ttft") and "dots" in _colours(page, "itl"), "latencies")
        label = page.locator("#pool").get_attribute("aria-label")
        assert label is not None and label.startswith("Page pool of 256:") and "shared" in label
        tiles = dict(
            zip(page.locator("#tiles dt").all_inner_texts(), page.locator("#tiles dd").all_inner_texts(), strict=True)
        )
        assert tiles["running"] == "4" and tiles["compiles"] == "0", tiles
        titles = [tile.get_attribute("title") for tile in page.locator("#tiles > div").all()]
        assert len(titles) == 11 and all(title and title.endswith(".") for title in titles), titles
        lines = page.locator("#tiers > div").all_inner_texts()
        assert [line.split()[0] for line in lines] == ["host", "store"], lines
        assert "of 8 slots used" in lines[0] and "5 filled, 2 write_skipped, left alone 3 times" in lines[1], lines
        page.click("#pause")
        expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")


def test_dark_and_light_differ(browser: Browser) -> None:
    with watched() as parts:
        grounds = []
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme)
            _open(page, parts)
            grounds.append(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
            page.close()
    assert grounds[0] != grounds[1]


def test_ten_thousand_pages_are_drawn_with_few_calls(page: Page) -> None:
    with watched(num_pages=10_000) as parts:
        ask(parts, "abcdefghijklmnop" * 8, max_tokens=8)
        until_idle(parts)
        _open(page, parts)
        until(lambda: "10000" in (page.locator("#pool").get_attribute("aria-label") or ""), "the map")
        num_calls = page.evaluate(
            """async () => {
                const { drawPool, expand, layout } = await import("./static/draw.js");
                const states = expand("1f1c1u1s".repeat(2500));
                const canvas = document.getElementById("pool");
                const { each } = layout(canvas.clientWidth, canvas.clientHeight, states.length);
                if (each !== 1) throw new Error(`a cell is ${each} pages`);
                let calls = 0;
                const known = Object.getOwnPropertyDescriptors(CanvasRenderingContext2D.prototype);
                for (const [name, { value, get, set }] of Object.entries(known)) {
                    const count = (f) => f && function (...given) { calls += 1; return f.apply(this, given); };
                    if (typeof value === "function") CanvasRenderingContext2D.prototype[name] = count(value);
                    else if (set) Object.defineProperty(
                        CanvasRenderingContext2D.prototype, name, { get, set: count(set), configurable: true });
                }
                drawPool(canvas, states);
                return calls;
            }"""
        )
    assert 0 < num_calls < 2 * 10_000, "neighbours differ in state: about one call for each page"


def test_everything_has_a_name_and_the_keyboard_reaches_it(page: Page) -> None:
    with watched() as parts:
        _open(page, parts)
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll("input, textarea, select, button, canvas")].filter((e) => !(
                e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim())).map((e) => e.id)"""
        )
        assert unnamed == []
        assert page.locator("html").get_attribute("lang") == "en"
        reached = set()
        for _ in range(14):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id"))
        assert {"clear", "prompt", "send", "pause"} <= reached
        assert "key" not in reached, "nobody has asked for one"


def test_it_comes_back_when_the_server_does(page: Page) -> None:
    with watched() as parts:
        ask(parts, max_tokens=40)
        _open(page, parts)
        port = int(parts.http_url.rpartition(":")[2])
    expect(page.locator("#state")).not_to_have_attribute("data-state", "live")
    with watched(port=port) as parts:
        ask(parts, max_tokens=3)
        expect(page.locator("#state")).to_have_attribute("data-state", "live")
        until(lambda: "decode" in _colours(page, "steps"), "the steps of the new server")
