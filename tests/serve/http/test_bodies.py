"""Bodies that are hard to read: huge lists, the wrong type, other encodings and spellings of numbers, more than can be
queued; and connections that are not as usual: an offer of another protocol, an old one, one that is closed by half."""

import asyncio
import contextlib
import gc
import gzip
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
from serve_parts import WAIT_S, Served, objects_of, serve_bytes, wait_until

from jaxserve.serve.http import bodies, errors, guard, half_closed
from jaxserve.serve.http.server import FREE_CHUNKS, MIN_CHUNK_BYTES
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
        ("/v1/chat/completions", filled('{"messages":[', "1", "]}"), "at most 16384 items"),
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


# ---- chunks ---------------------------------------------------------------------------------------------------------


def in_chunks(body: bytes, size: int) -> bytes:
    chunks = (body[start : start + size] for start in range(0, len(body), size))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
    text = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + b"transfer-encoding: chunked\r\n\r\n" + text + b"0\r\n\r\n"


def test_a_body_in_many_tiny_chunks_is_refused(server: Served) -> None:
    small = json.dumps(ASK).encode()
    large = json.dumps(ASK).encode() + b" " * (FREE_CHUNKS * MIN_CHUNK_BYTES)
    [whole] = exchange(server, [in_chunks(small, 1)])
    assert [whole["choices"][0]["text"], len(small) < FREE_CHUNKS] == ["bcd", True], "few may have any size"
    assert exchange(server, [in_chunks(large, MIN_CHUNK_BYTES)])[0]["choices"][0]["text"] == "bcd"
    host, port = server.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw, raw.makefile("rb") as stream:
        raw.sendall(in_chunks(large[: 2 * FREE_CHUNKS], 1))
        answer = stream.read()
    assert answer.startswith(b"HTTP/1.1 400 ") and b"send larger ones" in answer and b"connection: close" in answer
    wait_until(lambda: server.engine.num_live == 0, "nothing is left of it")


# ---- other encodings, and numbers as other languages write them ------------------------------------------------------

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_in_every_encoding_that_python_reads(server: Served, encoding: str) -> None:
    text = "aé🙂"
    with browse(server, **JSON) as client:
        for path, name in (("/tokenize", "prompt"), ("/v1/chat/completions", "unknown")):
            response = client.post(path, content=json.dumps({name: text}, ensure_ascii=False).encode(encoding))
            if name == "prompt":
                assert response.json()["tokens"][-len(text.encode()) :] == list(text.encode())
            else:
                assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        cut = client.post("/tokenize", content=json.dumps({"prompt": text}).encode(encoding)[:-1])
        assert cut.status_code == 400 and "no JSON that can be read" in cut.json()["error"]["message"]


CHAT = {"messages": [{"role": "user", "content": "a"}]}
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": Any}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "seed": Any, "n": 1.0}),
    ("/v1/completions", {"prompt": [97.0, Any], "max_tokens": 1}),
    ("/v1/completions", {"prompt": [[97, Any], [98.0]], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stop_token_ids": [Any]}),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": Any, "top_k": 4.0}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": Any}),
    ("/v1/responses", {"input": "a", "max_output_tokens": Any}),
    ("/v1/messages", {**CHAT, "model": "fake", "max_tokens": Any}),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": Any}),
    ("/detokenize", {"tokens": [97, Any]}),
]


def _with(body: Any, number: Any) -> Any:
    """The body, with the number in the place of `Any`."""
    if body is Any:
        return number
    if isinstance(body, dict):
        return {name: _with(value, number) for name, value in body.items()}
    return [_with(value, number) for value in body] if isinstance(body, list) else body


@pytest.mark.parametrize(("path", "body"), WHOLE)
def test_a_whole_number_may_have_a_point(server: Served, path: str, body: dict[str, Any]) -> None:
    with browse(server, **JSON) as client:
        for text, code in (("8.0", 200), ("8e0", 200), ("80E-1", 200), ("8", 200), ("8.5", 400), ("1e400", 400)):
            response = client.post(path, content=json.dumps(_with(body, "?")).replace('"?"', text))
            assert response.status_code == code, (text, response.text)
        for value in ("8", True, [8.0]):
            assert client.post(path, json=_with(body, value)).status_code == 400, value


def test_a_whole_number_beyond_its_range_is_told_by_its_name(server: Served) -> None:
    with browse(server, **JSON) as client:
        for path, body, name in (
            ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": -1.0}, "top_logprobs is -1,"),
            ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0.0}, "max_completion_tokens is 0,"),
            ("/v1/chat/completions", {**CHAT, "max_tokens": 0.0}, "max_tokens is 0,"),
            ("/v1/responses", {"input": "a", "max_output_tokens": 0.0}, "max_output_tokens is 0,"),
            ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1.0}, "top_n: Input should be greater than"),
        ):
            assert client.post(path, json=body).json()["error"]["message"].startswith(name)


# ---- old clients, and those that have said all -----------------------------------------------------------------------


def ask(version: str, body: dict[str, Any], *headers: bytes) -> bytes:
    content = json.dumps(body).encode()
    lines = [b"content-type: application/json", b"content-length: %d" % len(content), b"host: localhost", *headers]
    return b"POST /v1/completions HTTP/%s\r\n%s\r\n\r\n%s" % (version.encode(), b"\r\n".join(lines), content)


@contextlib.contextmanager
def connected(parts: Served) -> Iterator[socket.socket]:
    host, port = parts.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
        yield raw


def read_all(raw: socket.socket) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Status line, headers and body of the last answer, until the server closes the connection."""
    with raw.makefile("rb") as stream:
        octets = stream.read()
    head, _, body = octets.rpartition(b"HTTP/1.1 ")[2].partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, dict(line.split(b": ", 1) for line in lines), body


def text_of(events: bytes) -> str:
    """What the events of a stream have written."""
    found = [line.removeprefix(b"data: ") for line in events.splitlines() if line.startswith(b"data: ")]
    assert found.pop() == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in found)


@pytest.mark.parametrize("headers", [(), (b"connection: keep-alive",), (b"expect: 100-continue",)])
@pytest.mark.parametrize("half", [False, True])
def test_a_client_of_http_1_0(server: Served, headers: tuple[bytes, ...], half: bool) -> None:
    """It knows no chunks: the end of the connection is the end of a stream."""
    with connected(server) as raw:
        raw.sendall(ask("1.0", {**ASK, "stream": True}, *headers))
        if half:
            raw.shutdown(socket.SHUT_WR)
        status, fields, body = read_all(raw)
    assert (status, fields[b"connection"]) == (b"200 OK", b"close")
    assert not {b"transfer-encoding", b"content-length"} & fields.keys()
    assert text_of(body) == "bcd"
    with connected(server) as raw:
        raw.sendall(ask("1.0", ASK, *headers))
        status, fields, body = read_all(raw)
    assert (status, int(fields[b"content-length"])) == (b"200 OK", len(body))
    with connected(server) as raw:
        raw.sendall(ask("1.0", {"max_tokens": 0}, *headers))
        assert read_all(raw)[0].startswith(b"400 ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_has_said_all_gets_its_answer(
    server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool, version: str
) -> None:
    """Its answer takes longer here than the server waits before it looks whether it is still there."""
    monkeypatch.setattr(half_closed, "_FIRST_S", 0.0)
    monkeypatch.setattr(half_closed, "_REPLY_S", 0.01)
    monkeypatch.setattr(half_closed, "_PAUSE_S", 0.01)
    looked = threading.Event()
    look = half_closed.HalfClosed._look
    monkeypatch.setattr(half_closed.HalfClosed, "_look", lambda self: (look(self), looked.set()))
    server.runner.hold()
    try:
        with connected(server) as raw:
            raw.sendall(ask(version, {**ASK, "stream": stream}))
            raw.shutdown(socket.SHUT_WR)
            for _ in range(3):
                looked.clear()
                assert looked.wait(WAIT_S)
            server.runner.release()
            status, fields, body = read_all(raw)
    finally:
        server.runner.release()
    assert (status, fields[b"connection"]) == (b"200 OK", b"close")
    if not stream:
        assert json.loads(body)["choices"][0]["text"] == "bcd"
    else:
        assert (b"transfer-encoding" in fields) == (version == "1.1")
        assert b'"text":"b"' in body and body.count(b"[DONE]") == 1


@pytest.mark.parametrize("half_first", [False, True])
def test_a_client_that_has_gone_is_noticed(server: Served, monkeypatch: pytest.MonkeyPatch, half_first: bool) -> None:
    """Also one that has said before that it sends no more."""
    monkeypatch.setattr(half_closed, "_FIRST_S", 0.01)
    monkeypatch.setattr(half_closed, "_PAUSE_S", 0.01)
    server.runner.hold()
    try:
        with connected(server) as raw:
            raw.sendall(ask("1.1", ASK))
            wait_until(lambda: server.runner.is_held, "its step is held")
            if half_first:
                raw.shutdown(socket.SHUT_WR)
        wait_until(lambda: not server.engine._inbox.empty(), "the abort is in the inbox")
    finally:
        server.runner.release()


def test_half_a_request_is_none(server: Served) -> None:
    for cut in (10, -5):
        with connected(server) as raw:
            raw.sendall(ask("1.1", ASK)[:cut])
            raw.shutdown(socket.SHUT_WR)
            assert raw.recv(100) == b""


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


PARTS = '{"prompt":"a","max_tokens":1,"metadata":{"a":[' + ",".join(["[]"] * 2000) + "]}}"


def test_parts_of_a_body_are_bounded_in_any_encoding_and_texts_may_have_any() -> None:
    parts = serve_bytes(vocab_size=259, max_model_len=2**13, num_pages=2**10)
    with http_served(parts, max_json_parts=1000), browse(parts, **JSON) as client:
        for octets in (PARTS.encode(), PARTS.encode("utf-16"), filled("[", "{}", "]").encode()):
            response = client.post("/v1/completions", content=octets)
            assert response.status_code == 400
            assert "serve.http.max_json_parts" in response.json()["error"]["message"]
        response = client.post("/v1/completions", json={"prompt": "[{:" * 2000, "max_tokens": 1})
        assert response.status_code == 200, response.text


def test_a_large_body_is_read_on_a_thread_of_its_own(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    read_json = bodies.read_json

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return read_json(*given)

    monkeypatch.setattr(bodies, "read_json", noted)
    with browse(server) as client:
        for text in ("a", "a" * 2**17):
            client.post("/tokenize", json={"prompt": text, "keep_alive": 1}).raise_for_status()
    assert threads[0] is server.thread
    assert threads[1].name.startswith("jaxserve-large")  # where one body of a caller is read at a time


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": "a", "max_tokens": "' + b"x" * 200_000 + b'"}'),
        ("/v1/completions", b"[" * 200_000),
        ("/v1/completions", b"[]"),
    ],
    ids=["field", "large", "small"],
)
def test_a_body_that_was_refused_is_not_kept_until_a_collection(server: Served, path: str, body: bytes) -> None:
    """Errors whose tracebacks hold each other would: some megabytes for each call, beside an engine that works."""
    gc.collect()
    gc.disable()
    try:
        with browse(server) as client:
            assert client.post(path, content=body, headers=JSON).status_code == 400
        wait_until(lambda: not objects_of(bodies.Unreadable), "it is let go")
    finally:
        gc.enable()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, identity"])
def test_a_body_that_is_packed_is_not_unpacked(server: Served, encoding: str) -> None:
    packed = gzip.compress(json.dumps({"prompt": "a" * 300, "max_tokens": 1}).encode())
    with browse(server) as client:
        for size in (len(packed), SIZE):
            body = packed + bytes(size - len(packed))
            refused = client.post("/v1/completions", content=body, headers={**JSON, "content-encoding": encoding})
            assert refused.status_code == 415 and "send it plain" in refused.json()["error"]["message"]
        plain = client.post("/v1/completions", json=ASK, headers={"content-encoding": "identity"})
        assert plain.status_code == 200


def test_the_document_of_all_routes_is_made_off_the_event_loop(server: Served) -> None:
    with browse(server) as client, calls_on_the_loop(server) as calls:
        assert client.get("/openapi.json").json()["paths"]
    assert calls[0] < MOST_CALLS, calls
