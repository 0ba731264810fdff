"""The web page's live view in a real browser, against a real server: it follows the engine, keys work, nothing leaks.

test_page_chat.py has the chat. Skipped where no Chromium is installed (Debian: apt-get install chromium).
"""

from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from page_parts import LASTING_S, USAGE, answer_page, ask_page, needs_chromium, open_page, piece, show
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect
from serve_parts import IdleStore, Parts, Served, served
from watched import ask, until, until_idle, watched

from jaxserve.api import SamplingParams
from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.engine import EngineGroup
from jaxserve.routing import RouterOptions, create_router
from jaxserve.sched.plan import HostSlots
from jaxserve.testing import ByteTokenizer

pytestmark = needs_chromium


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


def _reconnect(page: Page) -> None:
    """What a new key does."""
    page.locator("#key-form").dispatch_event("submit")


def test_axes_of_few_values(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        show(page, "engine")
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


ANSWER = """# Sizes

A [link](https://example.com/), `code` and **more**:

| item | size |
|:-----|-----:|
| one  |   12 |

1. a list
   > with a quote

```python
print("a line that is wider than the column of a phone, and therefore scrolls within itself, not the page")
```
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_sizes_and_both_themes(browser: Browser, scheme: Literal["light", "dark"]) -> None:
    """With everything open that can be: nothing is cut off, and axe finds nothing."""
    with watched() as parts:
        page = browser.new_page(viewport={"width": 320, "height": 640}, color_scheme=scheme)
        open_page(page, parts)
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        ask(parts, max_tokens=20)
        answer_page(page, piece("", reasoning_content="Let me see."), piece(ANSWER, "stop"), USAGE, "[DONE]")
        page.locator("#chooser").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"x " * 200})
        ask_page(page, "a_word_without_any_space_" * 10)
        expect(page.locator(".messages .facts")).to_have_count(1)
        page.get_by_role("button", name="Retry answer 2").click()
        expect(page.locator(".messages .version")).to_have_text("2 of 2")
        page.click("#chats-toggle")
        for fold in page.locator("details").all():
            fold.evaluate("(element) => { element.open = true; }")
        fonts = """() => [...document.querySelectorAll("input, textarea, select")].filter((e) => e.checkVisibility())
            .map((e) => getComputedStyle(e).fontSize)"""
        assert set(page.evaluate(fonts)) == {"16px"}, "iOS zooms in on smaller ones"
        expect(page.locator("#context")).to_be_visible()
        for width, height in ((320, 640), (1024, 768), (3840, 2160)):
            page.set_viewport_size({"width": width, "height": height})
            for view in ("chat", "engine", *(["both"] if width >= 1024 else [])):
                show(page, view)
                too_wide = page.evaluate(
                    """() => [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() &&
                        !e.closest(".skip, .hidden, pre") && e.getBoundingClientRect().right > innerWidth)
                        .map((e) => e.outerHTML)"""
                )
                assert too_wide == [], (width, view)
                assert page.evaluate("document.documentElement.scrollWidth") == width
                found = Axe().run(page)
                assert found.violations_count == 0, f"{width}, {view}: {found.generate_report()}"
        assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") > 20, (
            "4k is read from farther away"
        )
        other = "light" if scheme == "dark" else "dark"
        ground = "getComputedStyle(document.documentElement).backgroundColor"
        before = page.evaluate(ground)
        page.select_option("#theme", other)
        assert page.evaluate(ground) != before
        page.reload()
        expect(page.locator("html")).to_have_attribute("data-theme", other)
        page.close()


# What is cut off or lies over something else. What scrolls shows its inside in parts, and what is made for readers of
# screens alone is a pixel large.
LAYOUT = """() => {
    const apart = ".skip, .hidden, option, pre code, .table table";
    const shown = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && !e.closest(apart));
    const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowY);
    const name = (e) => `${e.localName}#${e.id}.${e.className} ${e.textContent.trim().slice(0, 30)}`;
    const faults = [];
    for (const e of shown) {
        const box = e.getBoundingClientRect();
        if (box.left < 0 || box.right > innerWidth + 0.5) faults.push(`outside: ${name(e)}`);
        const hides = e.scrollHeight - e.clientHeight > 1 || e.scrollWidth - e.clientWidth > 1;
        const isText = e.matches("button, summary, dt, dd, h1, h2, label, p, figcaption, .tiles > div");
        if (isText && getComputedStyle(e).display !== "inline" && hides) faults.push(`cut: ${name(e)}`);
    }
    const kinds = "button, input, textarea, select, summary, canvas, h1, h2, dt, dd, p, meter, #messages";
    const leaves = shown.filter((e) => e.matches(kinds));
    for (const [i, one] of leaves.entries()) {
        for (const other of leaves.slice(i + 1)) {
            if (one.contains(other) || other.contains(one)) continue;
            const scroller = (e) => { while (e && !scrolls(e)) e = e.parentElement; return e; };
            if (scroller(one.parentElement) !== scroller(other.parentElement)) continue;
            const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
            const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (wide > 1 && high > 1) faults.push(`over each other: ${name(one)} and ${name(other)}`);
        }
    }
    return faults;
}"""


# Which of these fields is hidden when it has the focus, or hides Send; and whether Send can be scrolled out of sight.
COVERED = """(fields) => {
    const isHidden = (e) => {
        const box = e.getBoundingClientRect(), x = (box.left + box.right) / 2;
        return [box.top + 3, box.bottom - 3].some((y) => document.elementFromPoint(x, y) !== e);
    };
    const send = document.getElementById("send"), chat = document.querySelector(".chat");
    const covered = fields.filter((e) => { e.focus(); return isHidden(e) || isHidden(send); }).map((e) => e.id);
    for (const top of [0, chat.scrollHeight]) {
        chat.scrollTop = top;
        if (isHidden(send)) covered.push(`send, chat scrolled to ${top}`);
    }
    return covered;
}"""


@pytest.mark.parametrize(("width", "height"), [(320, 640), (360, 740), (390, 844), (844, 390), (768, 1024)])
def test_parts_have_their_place_on_a_phone(browser: Browser, width: int, height: int) -> None:
    """One column: nothing scrolls within the page but messages and open settings, no hole is under the field, nothing
    lies over another, Send is in sight while any setting is typed, and a line can be begun."""
    screen: ViewportSize = {"width": width, "height": height}
    with watched() as parts:
        page = browser.new_context(viewport=screen, has_touch=True, is_mobile=True).new_page()
        open_page(page, parts)
        assert page.evaluate("document.activeElement === document.body"), "no keyboard comes up by itself"
        assert page.evaluate(LAYOUT) == []
        answer_page(page, piece(ANSWER, "stop"), USAGE, "[DONE]")
        page.locator("#prompt").fill("hi")
        page.click("#send")
        expect(page.locator(".messages .facts")).to_have_count(1)
        assert page.evaluate("document.documentElement.scrollHeight - innerHeight") <= 1, "Send is below the window"
        page.get_by_text("Settings").click()
        page.locator("#messages").evaluate("(list) => { list.scrollTop = 0; }")
        assert page.evaluate(LAYOUT) == []
        page.locator("#prompt").fill("a line\n" * 30)
        assert page.locator(".fields").locator("input, select, textarea").evaluate_all(COVERED) == []
        page.locator("#prompt").fill("")
        page.get_by_text("Settings").click()
        gaps = page.evaluate(
            """() => { const box = (name) => document.querySelector(name).getBoundingClientRect();
                return { hole: box(".chat").bottom - box("#chat-form").bottom,
                    messages: box("#messages").height, chat: box(".chat").height }; }"""
        )
        assert gaps["hole"] < 40, gaps
        assert gaps["messages"] > 100 and gaps["chat"] <= height, gaps
        page.locator("#prompt").fill("one")
        page.locator("#prompt").press("Enter")
        page.locator("#prompt").press_sequentially("two")
        assert page.locator("#prompt").input_value() == "one\ntwo"
        page.click("#chats-toggle")
        assert page.evaluate(LAYOUT) == []
        page.locator("#chat-list .open").first.click()
        expect(page.locator("#chats")).to_be_hidden()
        ask(parts, max_tokens=20)
        until_idle(parts)
        show(page, "engine")
        expect(page.locator("#step-now")).to_contain_text("latest")
        page.get_by_text("What these numbers are").click()
        assert page.evaluate(LAYOUT) == []
        hidden = page.locator("#live").evaluate("(part) => part.scrollHeight - part.clientHeight")
        assert hidden <= 1, "all of the engine's part is shown"
        heights = page.locator("#live canvas").evaluate_all("(all) => all.map((e) => e.getBoundingClientRect().height)")
        assert len(heights) == 4 and min(heights) >= 100, heights
        expect(page.locator("#chats-toggle")).to_be_hidden()
        page.context.close()


def test_several_replicas_and_one_that_dies(page: Page) -> None:
    parts, second = Served(tokenizer=ByteTokenizer()), Parts(tokenizer=ByteTokenizer())
    first = parts.engine
    router = create_router("least_load", RouterOptions(slack=8, table_blocks=16, seed=0))
    parts.engine = EngineGroup([first, second.engine], router)  # pyright: ignore[reportAttributeAccessIssue]
    with served(parts, grpc_config=GrpcConfig(), http_config=HttpConfig(port=0)):
        open_page(page, parts)
        show(page, "both")
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
        ask_page(page, "hi")  # the other one answers
        expect(page.locator(".messages .facts")).to_have_count(1)


def test_a_server_that_falls_silent_is_not_live(page: Page) -> None:
    with watched() as parts:
        page.clock.install()
        open_page(page, parts)
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
        open_page(page, parts)
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


def test_a_key_is_asked_for_and_used(page: Page, tmp_path: Path) -> None:
    with watched(tmp_path) as parts:
        page.goto(f"{parts.http_url}/")
        expect(page.locator("#state-text")).to_have_text("an API key is needed")
        show(page, "both")
        expect(page.locator(".live .nothing")).to_be_visible()
        frames = page.locator("figure")
        assert [frame.is_visible() for frame in frames.all()] == [False] * 4, "there is nothing in them"
        page.fill("#key", "right-key")  # the field is there now
        page.press("#key", "Enter")
        expect(page.locator("#state")).to_have_attribute("data-state", "live")
        expect(page.locator("#key-form")).to_be_hidden()  # it has done its work
        expect(page.locator("#prompt")).to_be_focused()
        expect(page.locator(".live .nothing")).to_be_hidden()
        assert [frame.is_visible() for frame in frames.all()] == [True] * 4
        until(lambda: _colours(page, "pool") == {"free"}, "the pool is drawn")
        ask_page(page, "hi")
        expect(page.locator(".messages .facts")).to_have_count(1)
        assert "right-key" not in page.url
        page.reload()  # the tab keeps it
        expect(page.locator("#state")).to_have_attribute("data-state", "live")
        expect(page.locator("#key-form")).to_be_hidden()
        page.click("#key-again")
        expect(page.locator("#key")).to_be_focused()
        page.fill("#key", "wrong-key")
        page.press("#key", "Enter")
        expect(page.locator("#state-text")).to_have_text("the API key is not accepted")
        expect(page.locator("#key-form")).to_be_visible()
        ask_page(page, "and now?")
        expect(page.locator("#chat-error-text")).to_contain_text("does not accept this API key")
        page.fill("#key", "other-key")
        page.press("#key", "Enter")
        expect(page.locator("#key-form")).to_be_hidden()


def test_the_live_view_draws_what_the_engine_does(page: Page) -> None:
    slots = HostSlots(num_slots=8, max_draining=8, max_loads=8)
    with watched(delay_s=LASTING_S, slots=slots, store=IdleStore()) as parts:
        ask(parts, "abcdefghijklmnopqrstuvw", max_tokens=4)
        until_idle(parts)  # leaves pages in the cache
        open_page(page, parts)
        show(page, "engine")
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


def test_ten_thousand_pages_are_drawn_with_few_calls(page: Page) -> None:
    with watched(num_pages=10_000) as parts:
        ask(parts, "abcdefghijklmnop" * 8, max_tokens=8)
        until_idle(parts)
        open_page(page, parts)
        show(page, "engine")
        until(lambda: "10000" in (page.locator("#pool").get_attribute("aria-label") or ""), "the map")
        num_calls = page.evaluate(
            """async () => {
                const { drawPool, expand, layout } = await import("./static/draw.js");
                const states = expand("1f1c1u1s1w".repeat(2000));
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


def test_chat_and_engine_are_tabs(page: Page) -> None:
    """The chat has the page at first; the choice is kept; arrows lead from tab to tab, and Tab past them."""
    with watched() as parts:
        open_page(page, parts)
        panels = page.get_by_role("tabpanel", include_hidden=True)
        expect(panels).to_have_count(2)
        expect(page.locator("#live")).to_be_hidden()
        box = page.locator(".chat").bounding_box()
        assert box is not None and box["x"] + box["width"] > 1200, "all that the list of chats leaves"
        page.locator("#tab-chat").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Engine", selected=True)).to_be_focused()
        expect(page.get_by_role("tabpanel", name="Engine")).to_be_visible()
        expect(page.locator("#talk")).to_be_hidden()
        until(lambda: _colours(page, "pool") == {"free"}, "it is drawn once it is shown")
        page.get_by_text("What these numbers are").click()
        said = page.locator("#meanings dt").all_inner_texts()
        assert set(page.locator("#tiles dt").all_inner_texts()) <= set(said)
        page.locator("#tab-engine").focus()
        page.keyboard.press("End")
        expect(page.get_by_role("tab", name="Side by side", selected=True)).to_be_focused()
        expect(panels.filter(visible=True)).to_have_count(2)
        page.keyboard.press("Tab")
        expect(page.get_by_role("tab")).to_have_count(3)
        expect(page.locator("[role=tab]:focus")).to_have_count(0)
        page.reload()
        expect(page.locator("#state")).to_have_attribute("data-state", "live")
        until(lambda: _colours(page, "pool") == {"free"}, "it is there again")
        page.set_viewport_size({"width": 390, "height": 844})  # there is no room for both
        expect(page.get_by_role("tab")).to_have_text(["Chat", "Engine"])
        expect(panels.filter(visible=True)).to_have_count(1)
        expect(page.locator("#prompt")).to_be_visible()


def test_it_comes_back_when_the_server_does(page: Page) -> None:
    with watched() as parts:
        ask(parts, max_tokens=40)
        open_page(page, parts)
        show(page, "engine")
        port = int(parts.http_url.rpartition(":")[2])
    expect(page.locator("#state")).not_to_have_attribute("data-state", "live")
    with watched(port=port) as parts:
        ask(parts, max_tokens=3)
        expect(page.locator("#state")).to_have_attribute("data-state", "live")
        until(lambda: "decode" in _colours(page, "steps"), "the steps of the new server")
