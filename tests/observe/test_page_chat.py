"""The web page's chat in a real browser, against a real server: answers stream, are shown safely, and are kept.

Skipped where no Chromium is installed (Debian: apt-get install chromium).
"""

import dataclasses
import json
import re
from typing import Any

import pytest
from page_parts import LASTING_S, answer_page, ask_page, needs_chromium, open_page, piece, say
from picture_parts import picture_parts, png
from playwright.sync_api import FilePayload, Page, Route, expect
from serve_parts import served
from watched import until, watched

from jaxserve.config.schema import HttpConfig

pytestmark = needs_chromium
GONE = "The server does not answer. Please try again when it is back."


def _sent(page: Page, act: Any) -> list[tuple[str, str]]:
    """Roles and texts that the server is sent when `act` is done."""
    with page.expect_request("**/v1/chat/completions") as asked:
        act()
    return [(message["role"], message["content"]) for message in asked.value.post_data_json["messages"]]


def _until_kept(page: Page, text: str) -> None:
    """Waits until the browser keeps the chat that is shown with this text in it."""
    kept = """async () => {
        const { ChatStore } = await import("/static/chatstore.js");
        return JSON.stringify(await (await ChatStore.open(() => {})).get(location.hash.slice(1))) ?? "";
    }"""
    until(lambda: text in page.evaluate(kept), f"{text!r} in the browser's store")


def _titles(page: Page) -> list[str]:
    return page.locator("#chat-list .open").evaluate_all("(all) => all.map((e) => e.firstChild.textContent)")


def test_chat_streams_and_remembers(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        parts.runner.hold(after=4)
        ask_page(page, "hi", max_tokens=12)
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
        expect(page.locator(".messages .facts")).not_to_contain_text("tokens/s")  # of so few, a rate is noise
        ask_page(page, "and now?")
        expect(page.locator(".messages .facts")).to_have_count(2)
        names = "performance.getEntriesByType('resource').map((e) => e.name)"
        until(lambda: sum(url.endswith("/chat/completions") for url in page.evaluate(names)) == 2, "two whole streams")
        expect(page.locator(".messages .user .text")).to_have_text(["hi", "and now?"])
        page.click("#new-chat")
        expect(page.locator(".messages .empty")).to_be_visible()
        expect(page.locator("#prompt")).to_be_focused()


def test_files_come_by_drop_by_paste_and_by_choice(page: Page) -> None:
    give = """([id, kind, type, name, numbers]) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(numbers)], name, { type }));
        const options = { bubbles: true, cancelable: true };
        const event = kind === "paste"
            ? new ClipboardEvent("paste", { ...options, clipboardData: data })
            : new DragEvent("drop", { ...options, dataTransfer: data });
        document.getElementById(id).dispatchEvent(event);
    }"""
    with served(picture_parts(), http_config=HttpConfig(port=0)) as parts:
        open_page(page, parts)
        page.evaluate(give, ["chat-form", "drop", "image/png", "a", list(png(colour=1))])
        page.evaluate(give, ["prompt", "paste", "image/jpeg", "b", list(png(colour=2, kind="JPEG"))])
        expect(page.locator("#attachments img")).to_have_count(2)
        page.get_by_role("button", name="Remove picture 1").click()
        expect(page.locator("#attachments img")).to_have_count(1)
        page.evaluate(give, ["chat-form", "drop", "image/png", "c", list(png(colour=1))])
        ask_page(page, "what are these?")
        expect(page.locator(".messages .facts")).to_contain_text("5 tokens")
        expect(page.locator(".messages .user img")).to_have_count(2)
        expect(page.locator("#attachments")).to_be_hidden()
        assert parts.scheduler.encoder.num_encodes == 2
        page.evaluate(give, ["chat-form", "drop", "image/png", "d", [1, 2, 3]])
        ask_page(page, "and this?")
        expect(page.locator("#chat-error")).to_contain_text("none of the formats")
        expect(page.locator("#attachments img")).to_have_count(1)
        page.get_by_role("button", name="Remove picture 1").click()
        say(page, "fine")
        page.click("#new-chat")
        code = "# a\n```\nfenced\n```\n"
        page.locator("#chooser").set_input_files(
            [
                {"name": "read.me", "mimeType": "", "buffer": code.encode()},
                {"name": "a.zip", "mimeType": "application/zip", "buffer": b"PK\xff\x00"},
            ]
        )
        expect(page.locator("#chat-error-text")).to_have_text(
            "a.zip is neither text in UTF-8 nor a picture (PNG, JPEG, WebP)"
        )
        expect(page.locator("#attachments .file summary")).to_have_text(["read.me, 19 bytes"])
        assert _sent(page, lambda: ask_page(page, "Explain.")) == [
            ("user", f"File read.me:\n````\n{code}````\n\nExplain.")
        ]
        expect(page.locator(".messages .user .file summary")).to_have_text(["read.me, 19 bytes"])
        too_large = {"name": "big.txt", "mimeType": "text/plain", "buffer": b"a" * (2**20 + 1)}
        page.locator("#chooser").set_input_files(too_large)
        expect(page.locator("#chat-error")).to_contain_text("a text file may have 1024 KiB")


def test_stop_ends_the_request_and_frees_its_pages(page: Page) -> None:
    with watched(delay_s=LASTING_S) as parts:
        open_page(page, parts)
        ask_page(page, "go", max_tokens=400)
        expect(page.locator(".messages .assistant .text")).not_to_be_empty()
        page.keyboard.press("Escape")
        until(lambda: parts.engine.num_live == 0 and parts.scheduler.num_held_pages == 0, "free pages")
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator("#stop")).to_be_hidden()
        facts = page.locator(".messages .facts")
        expect(facts).to_contain_text(re.compile(r"first text after .* · \d+ tokens? · stopped"))  # it has figures, too
        expect(page.locator("#prompt")).to_be_focused()
        expect(page.locator("#context-text")).to_contain_text("of 512 tokens")


def test_a_chat_beyond_its_context(page: Page) -> None:
    """It asks for what fits, says how full the context is, and leaves out the oldest where nothing fits any more."""
    with watched() as parts:
        open_page(page, parts)
        expect(page.locator("#context")).to_be_hidden()
        for count in (1, 2, 3):
            ask_page(page, f"{count}" * 100, max_tokens=20)
            expect(page.locator(".messages .facts")).to_have_count(count)
        meter = page.locator("#context-meter")
        used = meter.evaluate("(meter) => meter.value")
        expect(page.locator("#context-text")).to_have_text(f"{used} of 512 tokens")
        assert 360 < used < 512
        page.locator("#max_tokens").evaluate("(field) => { field.value = ''; }")
        page.fill("#prompt", "4" * 200)
        page.press("#prompt", "Enter")
        said = r"The question has (\d+) tokens and the whole conversation (\d+) tokens; the model takes in 512"
        expect(page.locator("#chat-error")).to_contain_text(re.compile(said))
        found = re.search(said, page.locator("#chat-error").inner_text())
        assert found is not None and 200 < int(found[1]) < 512 <= int(found[2])
        expect(page.locator("#prompt")).to_have_value("4" * 200)
        parts.runner.delay_s = 0.005  # a rate is that of an answer which takes some time
        with page.expect_request("**/v1/chat/completions") as asked:
            page.get_by_role("button", name="Leave out the older half and ask again").click()
        body = asked.value.post_data_json
        assert "max_tokens" not in body
        texts = [message["content"] for message in body["messages"] if message["role"] == "user"]
        assert texts == ["3" * 100, "4" * 200]
        expect(page.locator(".messages .facts")).to_have_count(4)
        expect(page.locator(".messages .facts").last).to_contain_text("cut: the context is full")
        expect(page.locator(".messages .facts").last).to_contain_text("tokens/s")
        expect(page.locator(".messages .cut")).to_be_visible()
        expect(page.locator(".messages .unsent")).to_have_count(4)
        expect(page.locator("#context-text")).to_have_text("512 of 512 tokens")
        page.fill("#prompt", "5" * 600)  # to leave something out does not help here
        page.press("#prompt", "Enter")
        expect(page.locator("#chat-error")).to_contain_text("The question alone has 6")
        expect(page.locator("#leave-out")).to_be_hidden()
        page.click("#new-chat")
        expect(page.locator("#context")).to_be_hidden()


def test_a_server_that_has_gone_is_named_in_the_chat(page: Page) -> None:
    """In words of the page, not of a browser ("Failed to fetch")."""
    with watched() as parts:
        open_page(page, parts)
    ask_page(page, "hi")
    expect(page.locator("#chat-error-text")).to_have_text(GONE)
    expect(page.locator("#prompt")).to_have_value("hi")
    expect(page.locator("#chat-list li")).to_have_count(0)


def test_a_chat_that_is_removed_while_it_is_saved_is_gone(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        found = page.evaluate(
            """async () => {
            const { ChatStore } = await import("/static/chatstore.js");
            const store = await ChatStore.open(() => {});
            const saving = store.save({ id: "one", title: "One", changed: 1, messages: [] });
            await store.remove("one");
            await saving;
            return (await store.list()).length;
        }"""
        )
    assert found == 0


MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b>"
HOSTILE = f"""{MARKUP}

<iframe srcdoc="<script>alert(3)</script>"></iframe>
<style>body {{ display: none }}</style>

# <svg onload=alert(4)>

[a](javascript:alert(5)) [b](javascript&#58;alert(6)) [c](data:text/html,<script>alert(7)</script>) [d](/static/page.js)
[e](JaVaScRiPt:alert(8)) <javascript:alert(9)> [f](vbscript:x "onmouseover=alert(10)") [g](https://example.com/"onclick="x)
![h](https://example.com/pixel.png) ![i" onerror="alert(11)](javascript:alert(12)) `<b>code</b>` &lt;b&gt;

| <u>j</u> |
|---|
| <img src=x onerror=alert(13)> |

```"><script>alert(14)</script>
</code></pre><script>alert(15)</script>
```
- [x] <input onfocus=alert(16) autofocus>
"""


def test_no_text_is_ever_markup(page: Page) -> None:
    """A user's, a model's, an error's, a file's, and that of the title of a chat."""
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    with watched() as parts:
        open_page(page, parts)
        answer_page(page, piece("", reasoning_content=HOSTILE), piece(HOSTILE, MARKUP), "[DONE]")
        page.locator("#chooser").set_input_files({"name": MARKUP, "mimeType": "text/plain", "buffer": MARKUP.encode()})
        ask_page(page, MARKUP)
        expect(page.locator(".messages .facts")).to_contain_text(MARKUP)
        expect(page.locator(".messages .user .text")).to_have_text(MARKUP)
        expect(page.locator(".messages .assistant .text")).to_contain_text(MARKUP)
        expect(page.locator(".messages .thoughts > div")).to_contain_text(MARKUP)
        expect(page.locator("#chat-list .open")).to_contain_text(MARKUP[:50])
        inside = page.evaluate(
            """() => [...document.querySelectorAll(".messages *, #chat-list *")].map((e) =>
                [e.localName, ...e.getAttributeNames()])"""
        )
        known = {"li", "ol", "ul", "p", "div", "span", "details", "summary", "pre", "code", "button", "a", "br", "time"}
        known |= {"table", "thead", "tbody", "tr", "th", "td", "h3"}
        assert {name for name, *_ in inside} <= known
        attributes = {attribute for _, *all in inside for attribute in all}
        assert attributes <= {"class", "type", "tabindex", "role", "aria-label", "aria-current", "hidden", "id"} | {
            "href",
            "title",
            "target",
            "rel",
        }
        links = page.locator(".messages a").evaluate_all("(all) => all.map((a) => [a.href, a.rel, a.textContent])")
        rel = "noopener noreferrer nofollow"
        assert links == [
            ["https://example.com/%22onclick=%22x", rel, "g"],
            ["https://example.com/pixel.png", rel, "[picture: h]"],
        ]
        answer_page(page, {"error": {"message": MARKUP}})
        ask_page(page, "and?")
        expect(page.locator("#chat-error")).to_contain_text(MARKUP)
        page.route("**/events", lambda r: r.fulfill(status=429, json={"error": {"message": MARKUP}}))
        page.locator("#key-form").dispatch_event("submit")
        expect(page.locator("#state-text")).to_have_text(MARKUP)
        assert dialogs == []


TEXT = """# Title
A *soft* and **strong** `x < y` &eacute; &amp; line
with a break, ~~gone~~ and https://example.com/a_b_c

2. two
3. three
   - [ ] open
   - deeper

> quoted
>
> | a | b |
> |:-:|--:|
> | 1 | 2 |

```python
if a < b:
    print("*")
```
***
Done [link][1].

[1]: https://example.com/one
"""


def test_markdown(page: Page) -> None:
    """Whole, and as it grows: at each length as if it had come at once, and what is ready is not made again."""
    with watched() as parts:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        open_page(page, parts)
        say(page, TEXT)
        ask_page(page, "hi")
        text = page.locator(".messages .assistant .text")
        expect(text.locator("h3")).to_have_text("Title")
        expect(text.locator("em")).to_have_text("soft")
        expect(text.locator("strong")).to_have_text("strong")
        expect(text.locator("p > code")).to_have_text("x < y")
        expect(text.locator("> p").first).to_contain_text("é & line")
        assert text.locator("ol").get_attribute("start") == "2"
        expect(text.locator("ol ul li")).to_have_text(["☐ open", "deeper"])
        bullets = text.locator("ol ul li").evaluate_all("(all) => all.map((e) => getComputedStyle(e).listStyleType)")
        assert bullets[0] == "none" != bullets[1], bullets
        expect(text.locator("blockquote td")).to_have_text(["1", "2"])
        assert text.locator("blockquote td").last.get_attribute("class") == "to-right"
        links = text.locator("a").evaluate_all("(all) => all.map((a) => a.href)")
        assert links == ["https://example.com/a_b_c", "https://example.com/one"]
        code = 'if a < b:\n    print("*")'
        expect(text.locator("pre")).to_have_text(code, use_inner_text=True)
        page.get_by_role("button", name="Copy this code").click()
        expect(page.get_by_role("button", name="Copied this code")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == code
        # Without the modern way, which browsers offer over https and on localhost alone.
        page.evaluate(
            """() => { window.clipboard = navigator.clipboard;
                Object.defineProperty(navigator, "clipboard", { value: undefined }); }"""
        )
        page.get_by_role("button", name="Copy answer 2").click()
        expect(page.get_by_role("button", name="Copied answer 2")).to_be_visible()
        assert page.evaluate("window.clipboard.readText()") == TEXT
        wrong = page.evaluate(
            """async (text) => {
                const { MarkdownView } = await import("/static/markdown.js");
                const grown = document.createElement("div"), view = new MarkdownView(grown), wrong = [];
                for (let end = 0; end <= text.length; end += 1) {
                    const part = text.slice(0, end), whole = document.createElement("div");
                    view.show(part);
                    new MarkdownView(whole).show(part);
                    if (grown.innerHTML !== whole.innerHTML) wrong.push(part);
                }
                view.show("one\\n\\ntwo");
                const first = grown.firstChild;
                view.show("one\\n\\ntwo, three");
                if (grown.firstChild !== first || grown.textContent !== "onetwo, three") wrong.push("made again");
                const deep = document.createElement("div");
                const all = [">".repeat(20000) + "a", "- ".repeat(2000) + "a", "[".repeat(20000), "*a ".repeat(9000)];
                for (const hard of all) {
                    new MarkdownView(deep).show(hard);
                    if (!deep.textContent.includes(hard.at(-2))) wrong.push("hidden");
                    deep.replaceChildren();
                }
                return wrong;
            }""",
            TEXT,
        )
        assert wrong == []


FORMULAS = r"""Inline $a*b*c$, \(x_1 * y_1\) and $\{1,2\}$; \[a^2\] too.

$$
\begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix}
$$

\[\int x\,dx\]

It costs $5 and $10, or $5-$10; `$a$` is code, \$a$ too; $\wrong{$ and
\href{javascript:alert(1)}{x} $\href{javascript:alert(2)}{x}$ stay.
"""


def test_formulas_are_drawn_whole(page: Page) -> None:
    """No star or backslash of a formula is Markdown's, prices are no formulas, what cannot be drawn stays as it was."""
    with watched() as parts:
        open_page(page, parts)
        answer_page(page, piece(FORMULAS, "stop"), "[DONE]")
        ask_page(page, "hi")
        text = page.locator(".messages .assistant .text")
        expect(text.locator("math")).to_have_count(6)
        expect(text.locator(".formula-apart math")).to_have_count(2)
        expect(text.locator("mtd")).to_have_text(["1", "2", "3", "4"])
        expect(text.locator("math").first).to_have_text("a\u2217b\u2217c")
        expect(text).to_contain_text("It costs $5 and $10, or $5-$10; $a$ is code, $a$ too;")
        expect(text).to_contain_text(r"$\wrong{$ and")
        expect(text).to_contain_text(r"$\href{javascript:alert(2)}{x}$ stay.")
        expect(text.locator("em, a")).to_have_count(0)


def test_thoughts_are_folded_and_not_sent_back(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        answer_page(page, piece("", reasoning_content="Six times "), piece("", reasoning_content="seven."))
        ask_page(page, "6*7?")
        expect(page.locator("#chat-error")).to_contain_text(
            "ended before the answer did"
        )  # thoughts alone are kept, too
        thoughts = page.locator(".messages .thoughts")
        expect(thoughts.locator("summary")).to_have_text("Thoughts")
        expect(thoughts.locator("div")).to_be_hidden()
        answer_page(page, piece("", reasoning_content="Again."), piece("42", "stop"), "[DONE]")
        page.get_by_role("button", name="Retry answer 2").click()
        expect(page.locator(".messages .assistant .text")).to_have_text("42")
        thoughts.locator("summary").click()
        expect(thoughts.locator("div")).to_have_text("Again.")
        assert _sent(page, lambda: ask_page(page, "sure?"))[:2] == [("user", "6*7?"), ("assistant", "42")]


def test_retry_edit_and_the_way_back(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        answer = page.locator(".messages .assistant .text")
        for question in ("one", "two"):
            say(page, f"to {question}")
            ask_page(page, question)
            expect(answer.last).to_have_text(f"to {question}")
        say(page, "again to one")
        assert _sent(page, page.get_by_role("button", name="Retry answer 2").click) == [("user", "one")]
        expect(answer).to_have_text(["again to one"])
        expect(page.locator("#prompt")).to_be_focused()  # and not the top of the page
        page.get_by_role("button", name="older version of answer 2").click()
        expect(answer).to_have_text(["to one", "to two"])
        page.get_by_role("button", name="Edit message 3").click()
        field = page.get_by_role("textbox", name="Text of message 3")
        expect(field).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Edit message 3")).to_be_focused()
        page.keyboard.press("Enter")
        field.fill("zwei")
        say(page, "to zwei")
        sent = _sent(page, lambda: page.keyboard.press("Control+Enter"))
        assert sent == [("user", "one"), ("assistant", "to one"), ("user", "zwei")]
        expect(answer).to_have_text(["to one", "to zwei"])
        _until_kept(page, "to zwei")
        page.reload()  # all versions are kept
        expect(answer).to_have_text(["to one", "to zwei"])
        page.get_by_role("button", name="older version of message 3").click()
        expect(answer).to_have_text(["to one", "to two"])
        expect(page.get_by_role("button", name="newer version of message 3")).to_be_focused()
        page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Retry answer 4").click()  # the server has gone: nothing is lost
    expect(page.locator("#chat-error-text")).to_have_text(GONE)
    expect(answer).to_have_text(["to one", "to two"])


def test_half_an_answer_is_kept_and_said_to_be_half(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        answer_page(page, piece("once upon"))
        ask_page(page, "tell")
        expect(page.locator("#chat-error")).to_contain_text("ended before the answer did")
        expect(page.locator(".messages .assistant .text")).to_have_text("once upon")
        expect(page.locator(".messages .facts")).to_have_text("broken off")
        say(page, " a time")
        roles = _sent(page, lambda: ask_page(page, "go on"))
        assert roles == [("user", "tell"), ("assistant", "once upon"), ("user", "go on")]
        expect(page.locator(".messages .facts")).to_have_count(2)
        expect(page.locator("#chat-error")).to_be_hidden()


@pytest.mark.slow
def test_chats_are_kept_in_the_browser(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        say(page, "first answer")
        page.locator("#system").evaluate("(field) => { field.value = 'Be kind.'; }")
        ask_page(page, "first question\nwith two lines")
        expect(page.locator(".messages .facts")).to_have_count(1)
        page.click("#new-chat")
        held: list[Route] = []
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", lambda route: held.append(route))
        page.locator("#system").evaluate("(field) => { field.value = ''; }")
        ask_page(page, "second question")
        expect(page.locator("#chat-list .when").first).to_have_text("is being answered")
        assert _titles(page) == ["second question", "first question"]
        page.get_by_role("button", name="first question").click()  # the answer to the second goes on meanwhile
        expect(page.locator(".messages .text")).to_have_text(["first question with two lines", "first answer"])
        assert page.locator("#system").input_value() == "Be kind."
        expect(page.locator("#send")).to_be_enabled()
        body = f"data: {json.dumps(piece('second answer', 'stop'))}\n\ndata: [DONE]\n\n"
        held[0].fulfill(body=body, content_type="text/event-stream")
        expect(page.get_by_text("is being answered")).to_have_count(0)
        page.reload()
        expect(page.locator(".messages .text")).to_have_text(["first question with two lines", "first answer"])
        page.get_by_role("button", name="second question").click()
        expect(page.locator(".messages .text")).to_have_text(["second question", "second answer"])
        with page.expect_download() as download:
            page.get_by_role("button", name="Download").click()
        assert download.value.suggested_filename == "second question.md"
        assert download.value.path().read_text() == (
            "# second question\n\n## You\n\nsecond question\n\n## Model\n\nsecond answer\n"
        )
        page.get_by_role("button", name="Rename").click()
        page.keyboard.type("new name")
        page.keyboard.press("Enter")
        expect(page.locator("#chat-list .open").first).to_contain_text("new name")
        other = page.context.new_page()
        other.goto(page.url)
        expect(other.locator(".messages .text")).to_have_text(["second question", "second answer"])
        page.get_by_role("button", name="Delete", exact=True).click()
        expect(page.locator("#dialog")).to_contain_text("Delete “new name” from this browser?")
        page.keyboard.press("Escape")
        assert _titles(page) == ["new name", "first question"]
        page.get_by_role("button", name="Delete", exact=True).click()
        page.click("#dialog-yes")
        expect(page.locator("#chat-list li")).to_have_count(1)
        expect(other.locator("#chat-list li")).to_have_count(1)  # another tab follows
        expect(other.locator(".messages .empty")).to_be_visible()
        other.close()
        page.click("#delete-all")
        page.click("#dialog-yes")
        expect(page.locator("#chat-list li")).to_have_count(0)
        expect(page.locator("#prompt")).to_be_focused()


def test_a_browser_that_is_full_or_keeps_nothing_says_so(page: Page) -> None:
    fill = """async (bytes) => {
        const { ChatStore } = await import("/static/chatstore.js");
        const store = await ChatStore.open(() => {});
        await store.write(null, (chats, heads) => {
            for (let id = 0; id < (bytes ? 1 : 200); id += 1) {
                const head = { id: `${id}`, title: `chat ${id}`, changed: id, bytes };
                chats.put(head);
                heads.put(head);
            }
        });
    }"""
    with watched() as parts:
        open_page(page, parts)
        say(page, "yes")
        for size, words in ((0, "200 chats are kept"), (49_999_999, "the chats have 50 MB")):
            page.evaluate(fill, size)
            ask_page(page, "one more")
            expect(page.locator("#chats-error")).to_contain_text(f"“one more” is not kept: {words}, which is the most")
            expect(page.locator(".messages .facts")).to_have_count(1)
            if size == 0:
                page.fill("#chat-filter", "CHAT 199")
                assert _titles(page) == ["chat 199"]
            page.click("#delete-all")
            page.click("#dialog-yes")
            expect(page.locator("#chats-error")).to_be_hidden()
        page.add_init_script("indexedDB.open = () => { throw new Error('not in a private window'); }")
        page.reload()
        expect(page.locator("#chats-error")).to_have_text("This browser keeps no chats: not in a private window")
        ask_page(page, "all the same")
        expect(page.locator(".messages .facts")).to_have_count(1)


def test_presets_and_wrong_settings(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        page.locator("#temperature").evaluate("(field) => { field.value = '7'; }")
        expect(page.locator("#temperature")).to_be_hidden()
        page.fill("#prompt", "hi")
        page.press("#prompt", "Enter")
        expect(page.locator("#temperature")).to_be_focused()  # it was folded away
        page.select_option("#preset", "Exact")
        page.fill("#system", "Be brief.")
        page.fill("#seed", "3")
        page.locator("#seed").blur()
        page.click("#preset-save")
        page.keyboard.type("Mine")
        page.keyboard.press("Enter")
        expect(page.locator("#preset")).to_have_value("Mine")
        page.select_option("#preset", "As the model wants")
        page.reload()
        expect(page.locator("#preset")).to_have_value("As the model wants")
        page.get_by_text("Settings").click()
        page.select_option("#preset", "Mine")
        with page.expect_request("**/v1/chat/completions") as asked:
            ask_page(page, "hi", max_tokens=4)
        body = asked.value.post_data_json
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        sampling = {name: value for name, value in body.items() if name not in ("messages", "model")}
        assert sampling == {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "temperature": 0,
            "max_tokens": 4,
            "seed": 3,
        }
        page.select_option("#preset", "Mine")
        page.click("#preset-delete")
        page.click("#dialog-yes")
        expect(page.locator("#preset option")).to_have_text(
            ["Own values", "As the model wants", "Exact", "Balanced", "Inventive"]
        )


def test_chat_by_keyboard_alone(page: Page) -> None:
    def go_to(name: str) -> None:
        """By Tab alone. What is focused must be seen to be."""
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()") == name:
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline == "solid", name
                return
        raise AssertionError(f"the keyboard does not reach {name}")

    def redraw_chats() -> None:
        """As when an answer that grows is saved, or another tab changes a chat."""
        page.evaluate("""() => new Promise((resolve) => {
            new MutationObserver(() => resolve()).observe(document.getElementById("chat-list"), { childList: true });
            new BroadcastChannel("jaxserve-chats").postMessage("of no chat");
        })""")

    with watched(delay_s=LASTING_S) as parts:
        open_page(page, parts)
        page.locator("#max_tokens").evaluate("(field) => { field.value = '400'; }")
        expect(page.locator("#prompt")).to_be_focused()  # from the start
        go_to("skip")
        page.keyboard.press("Enter")  # the link that skips to the prompt
        expect(page.locator("#prompt")).to_be_focused()
        page.keyboard.type("go")
        go_to("send")
        page.keyboard.press("Enter")
        expect(page.locator("#prompt")).to_be_focused()  # where a blank presses no button
        expect(page.locator(".messages .assistant .text")).not_to_be_empty()
        assert page.locator(".messages .assistant").get_attribute("aria-busy") == "true"
        page.keyboard.type("two words")
        go_to("stop")
        page.keyboard.press("Enter")
        expect(page.locator("#prompt")).to_be_focused()
        expect(page.locator("#prompt")).to_have_value("two words")
        expect(page.locator(".messages [aria-busy]")).to_have_count(0)
        parts.runner.delay_s = 0.0
        go_to("Retry answer 2")
        page.keyboard.press("Enter")
        expect(page.locator(".messages .version")).to_have_text("2 of 2")
        go_to("Rename")
        redraw_chats()
        page.keyboard.press("Enter")
        redraw_chats()
        page.keyboard.type("by hand")
        page.keyboard.press("Enter")
        expect(page.locator("#chat-list .open")).to_contain_text("by hand")
        assert page.evaluate("document.activeElement.textContent") == "Rename"
        go_to("tab-chat")
        page.keyboard.press("End")
        go_to("pause")
        go_to("new-chat")
        page.keyboard.press("Enter")
        expect(page.locator("#prompt")).to_be_focused()


def test_errors_are_shown_and_the_question_is_kept(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        page.fill("#prompt", "x" * 3)
        page.locator("#max_tokens").evaluate("(field) => { field.value = '100000'; }")
        with page.expect_response("**/v1/chat/completions") as response:
            page.press("#prompt", "Enter")
        assert response.value.status == 400
        expect(page.locator("#chat-error")).to_contain_text(
            "max_tokens is 100000, but the model has room for 512 in all"
        )
        expect(page.locator("#leave-out")).to_be_hidden()
        expect(page.locator("#prompt")).to_have_value("xxx")
        expect(page.locator(".messages .assistant")).to_have_count(0)
        expect(page.locator("#key-form")).to_be_hidden()
        refusal = {"error": {"message": "no such key", "code": 401}}
        page.route("**/v1/chat/completions", lambda r: r.fulfill(status=401, json=refusal))
        page.press("#prompt", "Enter")
        expect(page.locator("#chat-error-text")).to_have_text(
            "The server wants an API key. Please give one at the top of the page."
        )
        expect(page.locator("#key-form")).to_be_visible()
        page.locator("#max_tokens").evaluate("(field) => { field.value = '5'; }")
        for message, words in (
            ("messages[4].content: no more of this; set truncate_prompt_tokens", "no more of this"),
            ("'x' for top_k must be a number", "The server does not take this request."),
        ):
            page.unroute("**/v1/chat/completions")
            refusal = {"error": {"message": message}}
            page.route("**/v1/chat/completions", lambda r: r.fulfill(status=400, json=refusal))  # noqa: B023
            page.press("#prompt", "Enter")
            expect(page.locator("#chat-error-text")).to_have_text(words)


def test_a_busy_server_is_asked_again(page: Page) -> None:
    """After the pause that it asks for, which is counted down; Stop ends the wait and gives the question back."""
    with watched() as parts:
        page.clock.install()
        open_page(page, parts)
        asked: list[Route] = []
        page.route("**/v1/chat/completions", lambda route: asked.append(route))
        page.locator("#max_tokens").evaluate("(field) => { field.value = '5'; }")

        def refuse(status: int, pause_s: str) -> None:
            until(lambda: bool(page.title() and asked), "a question")  # the first lets the browser speak
            error = {"error": {"message": "the queue is full, raise serve.max_waiting"}}
            asked.pop().fulfill(status=status, json=error, headers={"retry-after": pause_s})

        page.fill("#prompt", "hi")
        page.press("#prompt", "Enter")
        refuse(429, "3")
        error = page.locator("#chat-error-text")
        expect(error).to_have_text("The server is busy. The question is asked again in 3 s.")
        page.clock.run_for(1000)
        expect(error).to_have_text("The server is busy. The question is asked again in 2 s.")
        assert not asked
        page.clock.run_for(2000)
        refuse(503, "2")
        expect(error).to_contain_text("again in 2 s")
        page.keyboard.press("Escape")
        expect(page.locator("#prompt")).to_have_value("hi")
        expect(page.locator("#chat-error")).to_be_hidden()
        page.press("#prompt", "Enter")
        refuse(429, "3600")
        expect(error).to_have_text("The server is busy. It asks for a pause of 60 minutes.")
        page.press("#prompt", "Enter")
        refuse(429, "1")
        expect(error).to_contain_text("again in 1 s")
        page.unroute("**/v1/chat/completions")
        page.clock.run_for(1000)
        expect(page.locator(".messages .facts")).to_contain_text("5 tokens")
        expect(page.locator("#chat-error")).to_be_hidden()


@pytest.mark.parametrize("knows", [True, False], ids=["the style sheet", "an older browser"])
def test_the_field_grows_with_its_text(page: Page, *, knows: bool) -> None:
    if not knows:
        page.add_init_script(
            """CSS.supports = () => false;
            addEventListener("DOMContentLoaded", () => (prompt.style.fieldSizing = "fixed"));
            const prompt = { get style() { return document.getElementById("prompt").style; } };"""
        )
    with watched() as parts:
        open_page(page, parts)
        expect(page.locator("#prompt")).to_be_focused()
        height = "document.getElementById('prompt').getBoundingClientRect().height"
        small = page.evaluate(height)
        for _ in range(8):
            page.keyboard.type("word")
            page.keyboard.press("Shift+Enter")
        assert page.evaluate(height) > small + 80
        assert page.evaluate("document.getElementById('prompt').scrollHeight") <= page.evaluate(height)
        page.fill("#prompt", "line\n" * 200)
        assert page.evaluate(height) <= 0.4 * 860 + 1
        say(page, "yes")
        page.click("#send")
        expect(page.locator("#prompt")).to_be_focused()
        assert page.evaluate(height) == small
        page.keyboard.press("Space")
        page.keyboard.press("Enter")  # nothing but a blank is no question
        expect(page.locator(".messages .user")).to_have_count(1)


def test_pictures_need_no_words_and_eyes(page: Page) -> None:
    picture: FilePayload = {"name": "a.png", "mimeType": "image/png", "buffer": png(colour=1)}
    with served(picture_parts(), http_config=HttpConfig(port=0)) as parts:
        open_page(page, parts)
        page.locator("#chooser").set_input_files(picture)
        expect(page.locator("#attachments img")).to_have_count(1)
        ask_page(page, "")
        expect(page.locator(".messages .facts")).to_contain_text("5 tokens")
        expect(page.locator(".messages .user img")).to_have_count(1)
        expect(page.locator(".messages .user .text")).to_be_hidden()
        assert _titles(page) == ["A picture"]
        assert parts.scheduler.encoder.num_encodes == 1
    with watched() as parts:
        open_page(page, parts)
        page.locator("#chooser").set_input_files(picture)
        expect(page.locator("#chat-error-text")).to_have_text("a.png is a picture, and this model sees none")
        expect(page.locator("#attachments img")).to_have_count(0)


def test_the_way_back_leads_to_the_chat_before(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        text = page.locator(".messages .user .text")
        for question in ("one", "two"):
            say(page, f"to {question}")
            page.click("#new-chat")
            ask_page(page, question)
            expect(page.locator(".messages .facts")).to_have_count(1)
            _until_kept(page, f"to {question}")
        page.get_by_role("button", name="one").first.click()
        expect(text).to_have_text(["one"])
        page.go_back()
        expect(text).to_have_text(["two"])
        page.go_back()
        expect(text).to_have_text(["one"])
        page.go_forward()
        expect(text).to_have_text(["two"])
        page.get_by_role("button", name="Delete", exact=True).click()
        page.click("#dialog-yes")
        expect(page.locator(".messages .empty")).to_be_visible()
        page.go_back()
        expect(text).to_have_text(["one"])


def test_a_reader_who_scrolled_up_gets_back_to_the_end(page: Page) -> None:
    with watched(delay_s=LASTING_S) as parts:
        open_page(page, parts)
        say(page, "a line\n\n" * 60)
        ask_page(page, "many")
        expect(page.locator(".messages .facts")).to_have_count(1)
        end, gap = page.locator("#to-end"), "(list) => list.scrollHeight - list.scrollTop - list.clientHeight"
        expect(end).to_be_hidden()
        page.unroute("**/v1/chat/completions")
        ask_page(page, "go", max_tokens=400)
        expect(page.locator(".messages .assistant .text").last).not_to_be_empty()
        page.locator("#messages").evaluate("(list) => { list.scrollTop = 0; }")
        expect(end).to_be_visible()
        assert page.locator("#messages").evaluate(gap) > 500
        end.click()
        expect(end).to_be_hidden()
        until(lambda: page.locator("#messages").evaluate(gap) < 60, "the end")
        page.keyboard.press("Escape")
        expect(page.locator("#stop")).to_be_hidden()


def test_nothing_moves_for_whom_it_is_too_much(page: Page) -> None:
    moves = "document.getAnimations().filter((a) => a.playState === 'running').length"
    with watched(delay_s=LASTING_S) as parts:
        open_page(page, parts)
        ask_page(page, "go", max_tokens=400)
        expect(page.locator(".messages .assistant .text")).not_to_be_empty()
        until(lambda: page.evaluate(moves) == 1, "the cursor that blinks")
        page.emulate_media(reduced_motion="reduce")
        until(lambda: page.evaluate(moves) == 0, "rest")
        page.keyboard.press("Escape")
        expect(page.locator("#stop")).to_be_hidden()


def test_examples_of_the_model_are_asked_at_a_click(page: Page) -> None:
    with watched() as parts:
        open_page(page, parts)
        expect(page.locator("#examples-part")).to_be_hidden()  # of this model nothing is known
        model = dataclasses.replace(parts.engine.model, examples=("What is 1+1?", "Say <b>."))
        parts.engine.model = model  # pyright: ignore[reportAttributeAccessIssue]
        page.reload()
        expect(page.locator("#examples button")).to_have_text(["What is 1+1?", "Say <b>."])
        say(page, "2")
        page.get_by_role("button", name="What is 1+1?").click()
        expect(page.locator(".messages .user .text")).to_have_text(["What is 1+1?"])
        expect(page.locator(".messages .assistant .text")).to_have_text("2")
        expect(page.locator("#prompt")).to_be_focused()
        page.click("#new-chat")
        expect(page.locator("#examples button")).to_have_count(2)
