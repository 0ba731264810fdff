"""The page's files, the live view's events, and profiles, over real HTTP."""

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from serve_parts import WAIT_S, Served
from watched import ask, http, until, until_idle, watched

from jaxserve.serve import service
from jaxserve.serve.http import observe, profile
from jaxserve.serve.http.live import run_lengths

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """A server for tests that change nothing in it."""
    with watched() as parts:
        yield parts


def _messages(
    url: str, enough: Callable[[list[dict]], bool], begun: threading.Event | None = None, **headers: str
) -> list[dict]:
    """What a view is told until it is enough, or until it ends."""
    found = []
    with http.stream("GET", f"{url}/events", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if begun is not None:
                    begun.set()
                if enough(found):
                    return found
    return found


def test_events_tell_each_step_once_and_agree_with_the_pool() -> None:
    with watched() as parts:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(_messages, parts.http_url, lambda found: len(_steps(found)) == 31)
            for _ in range(6):
                ask(parts, "abcdefghijklmnop", max_tokens=5)
                until_idle(parts)
                time.sleep(0.2)
            messages = reading.result(WAIT_S)
        (total,) = [stats.totals() for stats in parts.engine.stats]
    assert total.steps == 31  # the first prompt is cut at the edge of a bucket
    assert [step[0] for step in _steps(messages)] == list(range(31))
    for message in messages:
        (replica,) = message["replicas"]
        counts, letters = replica["counts"], _expand(replica["pages"])
        assert len(letters) == counts["pages"] == 256
        assert message["model"] == "fake" and message["accepting"] is True and message["compiles"] == 0
    last = messages[-1]["replicas"][0]
    assert _expand(last["pages"]).count("c") == last["counts"]["cached_pages"] > 0


def _steps(messages: list[dict]) -> list[list]:
    return [step for message in messages for step in message["replicas"][0]["steps"]]


def _expand(runs: str) -> str:
    number, letters = "", ""
    for character in runs:
        if character.isdigit():
            number += character
        else:
            letters += character * int(number)
            number = ""
    return letters


def test_run_lengths() -> None:
    assert run_lengths(b"ffffu") == "4f1u"
    assert run_lengths(b"") == ""
    assert _expand(run_lengths(b"cfuss" * 50)) == "cfuss" * 50


def test_events_need_a_key_and_the_page_does_not(tmp_path) -> None:
    with watched(tmp_path) as parts:
        assert http.get(f"{parts.http_url}/events").status_code == 401
        assert http.get(f"{parts.http_url}/").status_code == 200
        assert http.get(f"{parts.http_url}/static/page.js").status_code == 200
        assert len(_messages(parts.http_url, lambda found: True, authorization="Bearer other-key")) == 1


def test_a_view_that_is_left_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "MAX_VIEWERS", 2)
    with watched() as parts:
        url = f"{parts.http_url}/events"
        with http.stream("GET", url) as first:
            lines = first.iter_lines()
            next(lines)
            with http.stream("GET", url) as second:
                others = second.iter_lines()
                next(others)
                with http.stream("GET", url) as third:
                    assert third.status_code == 429 and third.headers["retry-after"]
                    assert "2 live views" in json.loads(third.read())["error"]["message"]
            until(lambda: _is_taken(url), "room after the second has left")
            next(lines)  # which harmed nobody


def test_views_that_are_opened_at_once_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "MAX_VIEWERS", 3)
    with watched() as parts:

        async def statuses() -> list[int]:
            async with httpx.AsyncClient(timeout=WAIT_S) as client, contextlib.AsyncExitStack() as stack:
                views = [client.stream("GET", f"{parts.http_url}/events") for _ in range(12)]
                return [answer.status_code for answer in await asyncio.gather(*map(stack.enter_async_context, views))]

        assert sorted(asyncio.run(statuses())) == [200] * 3 + [429] * 9


@contextlib.contextmanager
def profiled(tmp_path: Path, name: str = "profiles") -> Iterator[Served]:
    """A server whose operators may record profiles into a directory below `tmp_path`."""
    tokens = tmp_path / "operators"
    tokens.write_text("the-token")
    with watched(profile_dir=str(tmp_path / name), admin_tokens_file=str(tokens)) as parts:
        yield parts


OPERATOR = {"authorization": "Bearer the-token"}


def test_a_profile_needs_an_operator_and_no_page_of_another_site_can_start_one(tmp_path: Path) -> None:
    """What a form can send without being asked for permission."""
    with profiled(tmp_path) as parts:
        url = f"{parts.http_url}/debug/profile"
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            assert http.post(url, headers={**OPERATOR, "content-type": kind}).status_code == 415
        assert http.post(url, headers=OPERATOR).status_code == 415
        for headers in (JSON, {**JSON, "authorization": "Bearer another"}):
            assert http.post(url, headers=headers).status_code == 401
    assert not (tmp_path / "profiles").exists()


def _is_taken(url: str) -> bool:
    with http.stream("GET", url) as answer:
        return answer.status_code == 200


def test_an_open_view_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited for a view would wait for as long as a drain lasts, and longer than the test."""
    monkeypatch.setattr(service, "_FAREWELL_S", 10 * WAIT_S)
    begun = threading.Event()
    with watched(drain_s=10 * WAIT_S) as parts, concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_messages, parts.http_url, lambda found: False, begun)
        assert begun.wait(WAIT_S)
        parts.request_shutdown()
        assert parts.wait_for_exit() == 0
        assert reading.result(WAIT_S)[-1]["accepting"] is False


@pytest.mark.parametrize("path", ["/", "/static/page.css", "/static/live.js", "/static/icon.svg"])
def test_files_have_their_types_and_headers(shared: Served, path: str) -> None:
    answer = http.get(shared.http_url + path)
    head = http.head(shared.http_url + path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))
    kinds = {"/": "text/html", "css": "text/css", ".js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds[path[-3:]] if path != "/" else kinds["/"])
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in answer.text


@pytest.mark.parametrize(
    "path", ["/static/observe.py", "/static/..%2fobserve.py", "/static/%2e%2e/observe.py", "/static/", "/static/a/b"]
)
def test_nothing_but_the_page_can_be_read(shared: Served, path: str) -> None:
    assert http.get(shared.http_url + path).status_code == 404


def test_the_page_can_be_left_out() -> None:
    with watched(web_page=False) as parts:
        assert [http.get(parts.http_url + path).status_code for path in ("/", "/events")] == [404, 404]
        assert http.get(f"{parts.http_url}/metrics").status_code == 200


def test_profile_refuses_wrong_times(tmp_path: Path) -> None:
    with profiled(tmp_path) as parts:
        for seconds in ("0", "-1", "61", "nan", "inf", "x"):
            params = {"seconds": seconds}
            answer = http.post(f"{parts.http_url}/debug/profile", params=params, headers=JSON | OPERATOR)
            assert answer.status_code == 400, seconds
            assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not (tmp_path / "profiles").exists()


def test_a_profile_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with profiled(tmp_path, "file") as parts:
        answer = http.post(f"{parts.http_url}/debug/profile", params={"seconds": 0.1}, headers=JSON | OPERATOR)
    assert answer.status_code == 500
    assert "serve.http.profile_dir" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_one_profile_at_a_time(tmp_path: Path) -> None:
    with profiled(tmp_path) as parts, concurrent.futures.ThreadPoolExecutor(2) as pool:
        url, headers = f"{parts.http_url}/debug/profile", JSON | OPERATOR
        first = pool.submit(lambda: http.post(url, params={"seconds": 10}, headers=headers))
        until((tmp_path / "profiles").exists, "the first profile's directory")
        second = http.post(url, params={"seconds": 1}, headers=headers)
        assert (second.status_code, first.result(WAIT_S).status_code) == (409, 200)
        reply = first.result().json()
        assert reply["directory"].startswith(str(tmp_path)) and reply["seconds"] == 10
        assert any(name.endswith(".xplane.pb") for name in reply["files"]), reply
        assert http.post(url, params={"seconds": 0.1}, headers=headers).status_code == 200


@pytest.mark.slow
def test_a_profile_from_start_to_stop_and_one_that_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "MAX_OPEN_S", WAIT_S)
    with profiled(tmp_path) as parts:
        operator = httpx.Client(base_url=parts.http_url, headers=OPERATOR, timeout=WAIT_S)
        # What `vllm bench serve --profile` sends: the body of a completion.
        begun = operator.post("/start_profile", json={"prompt": "a", "max_tokens": 3}).json()["directory"]
        assert operator.post("/start_profile").status_code == 409
        assert operator.post("/stop_profile").json()["directory"] == begun
        assert [path.suffix for path in Path(begun).rglob("*.pb")] == [".pb"]
        assert operator.post("/stop_profile").status_code == 409
        monkeypatch.setattr(profile, "MAX_OPEN_S", 0.1)
        forgotten = Path(operator.post("/start_profile").json()["directory"])
        until(lambda: any(forgotten.rglob("*.pb")), "the end of a profile that nobody ends")
        operator.close()
