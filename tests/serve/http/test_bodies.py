"""Bodies that are hard to read: huge lists, the wrong type, an offer of another protocol, more than can be queued."""

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from http_parts import browse, http_served
from serve_parts import WAIT_S, Served, serve_bytes

from jaxserve.serve.http import errors, guard
from jaxserve.testing import ByteTokenizer

ASK = {"prompt": "a", "max_tokens": 3}
JSON = {"content-type": "application/json"}
SIZE = 2**20
MOST_PROBLEMS = 200
MOST_CALLS = 6 * 2**14  # of functions, on the event loop: some for each of the items that a list may have at most


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with http_served(serve_bytes(vocab_size=259, max_waiting=300)) as parts:
        yield parts


@contextlib.contextmanager
def calls_on_the_loop(parts: Served) -> Iterator[list[int]]:
    """How many functions, of Python and of C, the event loop calls within the block; there when it ends."""
    count = itertools.count()
    found: list[int] = []

    def note(frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            next(count)

    async def watch(profile: Callable[[object, str, object], None] | None) -> None:
        sys.setprofile(profile)

    asyncio.run_coroutine_threadsafe(watch(note), parts.loop).result(WAIT_S)
    try:
        yield found
    finally:
        asyncio.run_coroutine_threadsafe(watch(None), parts.loop).result(WAIT_S)
        found.append(next(count))


def filled(head: str, item: str, tail: str) -> str:
    return head + ",".join([item] * (SIZE // (len(item) + 1))) + tail


MANY_KEYS = ",".join(f'"k{k}": 1' for k in range(SIZE // 12))


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/completions", filled('{"prompt":[', "1.5", "]}"), "prompt: "),
        ("/v1/completions", filled('{"prompt":[', "1", "]}"), "the prompt has"),
        ("/v1/completions", filled('{"prompt":[', '"a"', "]}"), "at most 16384 items"),
        ("/v1/completions", filled('{"prompt":[', "{}", "]}"), "prompt: "),
        ("/v1/completions", filled('{"prompt":[', "[1]", "]}"), "at most 16384 items"),
        ("/v1/completions", "{" + MANY_KEYS + "}", "at most 100"),
        ("/v1/completions", '{"prompt":"a","logit_bias":{' + MANY_KEYS.replace("1,", '"x",') + "}}", "at most 16384"),
        ("/v1/chat/completions", filled('{"messages":[', '{"role":"user","content":"a"}', "]}"), "at most 16384 items"),
        ("/v1/chat/completions", filled('{"messages":[', "1", "]}"), "messages[0]: "),
        ("/v1/embeddings", filled('{"input":[', "1.5", "]}"), "input: "),
        ("/detokenize", filled('{"tokens":[', "1.5", "]}"), "tokens[0]: "),
    ],
)
def test_no_body_keeps_the_loop_busy(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: str, text: str
) -> None:
    """However large a body is, the work of refusing it is bounded: the calls, and the mistakes that pydantic tells."""
    problems: list[int] = []

    def invalid_body(told: Sequence[Any]) -> errors.HttpRefusal:
        problems.append(len(told))
        return plain(told)

    plain = errors.invalid_body
    monkeypatch.setattr(errors, "invalid_body", invalid_body)
    with browse(server, **JSON) as client, calls_on_the_loop(server) as calls:
        response = client.post(path, content=body)
    assert calls[0] < MOST_CALLS
    assert sum(problems) < MOST_PROBLEMS
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]


def test_a_batch_is_at_most_as_long_as_the_queue(server: Served) -> None:
    with browse(server) as client:
        for path, name in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
            response = client.post(path, json={name: ["a"] * 301})
            assert response.status_code == 400
            assert "at most 300 are taken (sched.max_waiting)" in response.json()["error"]["message"]
        answer = client.post("/v1/completions", json={"prompt": ["a", "k"] * 100, "max_tokens": 2}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["bc", "lm"] * 100


def test_an_empty_text_is_what_the_tokenizer_makes_of_it(server: Served) -> None:
    with browse(server) as client:
        answer = client.post("/v1/completions", json={"prompt": "", "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens"] == 1  # the token that begins a text
        response = client.post("/v1/completions", json={"prompt": "", "add_special_tokens": False})
        assert response.status_code == 400


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"messages": [MESSAGE, {"content": "a"}]}, "messages[1].role", "Field required"),
        (
            {"messages": [MESSAGE], "stream_options": {"x": 1}},
            "stream_options.x",
            "is not a field that this server knows",
        ),
        ({"messages": [MESSAGE | {"content": [{"type": "text"}]}]}, "messages[0].content", "content[0].text: Field"),
        ({"messages": [MESSAGE], "str": 1, "A[0]": 1}, "str", "A[0] is not a field"),
        ({"messages": [MESSAGE], "stop": [1]}, "stop", "stop[0]: Input should be a valid string"),
        ({"messages": [MESSAGE], "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.function: Field"),
        ({"messages": [MESSAGE], "k" * 5000: 1}, "k" * 200, "(shortened)"),
        ([], "body", "valid dictionary"),
    ],
)
def test_a_mistake_is_told_by_its_place(server: Served, body: Any, param: str, text: str) -> None:
    with browse(server) as client:
        error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == param
    assert text in error["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_says_that_it_is_json(server: Served, kind: str | None) -> None:
    with browse(server) as client:
        headers = {} if kind is None else {"content-type": kind}
        response = client.post("/v1/completions", content=json.dumps(ASK), headers=headers)
        assert response.status_code == 415
        assert "content-type: application/json" in response.json()["error"]["message"]
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert client.post("/v1/completions", content=json.dumps(ASK), headers=headers).status_code == 200


# ---- offers of HTTP/2, as Java's HttpClient makes with each request in the clear ------------------------------------

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


def offering(framing: bytes, body: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n" + OFFER
    return head + framing + b"\r\n" + body


def exchange(parts: Served, *requests: Sequence[bytes]) -> list[Any]:
    """The bodies of the answers on one connection. Each request comes in pieces."""
    host, port = parts.http_url.removeprefix("http://").split(":")
    answers = []
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw, raw.makefile("rb") as stream:
        for pieces in requests:
            for piece in pieces:
                raw.sendall(piece)
                time.sleep(0.02)  # so that they arrive apart
            assert stream.readline().startswith(b"HTTP/1.1 200")
            headers = dict(line.strip().split(b": ", 1) for line in iter(stream.readline, b"\r\n"))
            answers.append(json.loads(stream.read(int(headers[b"content-length"]))))
    return answers


@pytest.mark.parametrize("cut", [None, 60, -20, -1])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_http2_is_ignored(server: Served, cut: int | None, chunked: bool) -> None:
    body = json.dumps(ASK).encode()
    if chunked:
        request = offering(b"transfer-encoding: chunked\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    else:
        request = offering(b"content-length: %d\r\n" % len(body), body)
    pieces = [request] if cut is None else [request[:cut], request[cut:]]
    answers = exchange(server, pieces, [request], [b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + OFFER + b"\r\n"])
    assert [answer["choices"][0]["text"] for answer in answers[:2]] == ["bcd", "bcd"]
    assert answers[2] == {"status": "ok"}


# ---- text that takes for ever ----------------------------------------------------------------------------------------


class StuckTokenizer(ByteTokenizer):
    """Encodes nothing until it may."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert self.go.wait(WAIT_S)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_work_before_the_first_token_has_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_GRACE_S", 0.1)
    tokenizer = StuckTokenizer()
    with http_served(Served(tokenizer=tokenizer), request_timeout_s=0.2) as parts, browse(parts) as client:
        try:
            for path, body in (("/v1/completions", ASK), ("/tokenize", {"prompt": "a"})):
                response = client.post(path, json=body)
                assert response.status_code == 408
                assert response.json()["error"]["type"] == "timeout_error"
        finally:
            tokenizer.go.set()
        assert client.get("/health").status_code == 200
