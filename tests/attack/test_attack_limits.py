"""What one caller may ask for at most: each request beyond is refused with its status and the setting or limit by name,
at the real doors, and others are answered as before."""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from attack_parts import ATTACKER, Remains, assert_at_rest, calling, guarded, others_answer
from serve_parts import LONG_TOKENS, WAIT_S, Served, serve_bytes, serve_slowly, wait_until

from jaxserve.api import SamplingParams
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.serve.gen import inference_pb2 as pb

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ASK = {"prompt": "a", "max_tokens": 3}
MAKE = {"input_file_id": "file-1", "endpoint": CHATS, "completion_window": "24h"}
ROOM = 200_000  # bytes for all bodies
BODY = 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    sizes = {"max_body_bytes": BODY, "max_bodies_bytes": ROOM, "batch_file_bytes": 150_000}
    parts = serve_bytes(vocab_size=259, max_waiting=300, max_waiting_tokens=100_000)
    with guarded(parts, tmp_path_factory.mktemp("limits"), **sizes):
        others_answer(parts)  # starts the threads that encode
        yield parts


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (COMPLETIONS, {**ASK, "stop": [*"abcde"]}, 400, "serve.max_stops"),
        (CHATS, {"messages": [{"role": "user", "content": "a"}], "stop": [*"abcde"]}, 400, "serve.max_stops"),
        (COMPLETIONS, {**ASK, "n": 129}, 400, "serve.max_n"),
        (COMPLETIONS, {**ASK, "prompt": ["a"] * 2049}, 400, "serve.max_prompts"),
        (COMPLETIONS, {**ASK, "prompt": ["a"] * 32, "n": 128}, 400, "max_waiting"),
        (COMPLETIONS, {**ASK, "prompt": ["a" * 500] * 300}, 413, "serve.http.max_body_bytes"),
        (COMPLETIONS, {**ASK, "prompt": ["a" * 500] * 60, "n": 4}, 429, "max_waiting_tokens"),
        (COMPLETIONS, {**ASK, "user": "x" * BODY}, 413, "serve.http.max_body_bytes"),
        (COMPLETIONS, {**ASK, "prompt": "a" * 1000}, 400, "512"),
        (COMPLETIONS, {**ASK, "logit_bias": {str(k): 1 for k in range(600)}}, 400, "logit_bias"),
        (COMPLETIONS, {**ASK, "bad_words": [f"w{k}" for k in range(40)]}, 400, "bad_words"),
        (COMPLETIONS, {**ASK, "logprobs": 21}, 400, "logprobs"),
        (COMPLETIONS, {**ASK, "prompt_logprobs": 21}, 400, "prompt_logprobs"),
        (COMPLETIONS, {**ASK, "prompt": [[1]] * 20_000}, 400, "16384"),
        (COMPLETIONS, {**ASK, "model": "x" * 5000}, 404, "is not served here"),
        ("/v1/batches", {**MAKE, "metadata": {f"{k}": "" for k in range(17)}}, 400, "at most 16 pairs"),
        ("/v1/responses", {"input": "a", "metadata": {"a": "x" * 513}}, 400, "at most 16 pairs"),
        ("/v1/responses", {"input": "a", "previous_response_id": "../../keys"}, 404, "response"),
        ("/v1/batches", {**MAKE, "input_file_id": "../../keys"}, 404, "file"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_more_than_the_limit_is_refused(
    server: Served, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    before = Remains.now()
    with calling(server, ATTACKER) as client:
        answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert re.search(text, answer.json()["error"]["message"]), answer.text
    assert others_answer(server) == "bcd"
    assert_at_rest(server, before)


@pytest.mark.parametrize("body", [b"[" * 50_000, b'{"prompt": ' + b"[" * 40_000, b'{"a":' * 15_000, b"\xff" * 1000])
def test_what_is_no_json_is_refused(server: Served, body: bytes) -> None:
    with calling(server, ATTACKER) as client:
        answer = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 2000, "no body is sent back"
    assert others_answer(server) == "bcd"


@pytest.mark.parametrize(
    "name", ["..%2f..%2fkeys", "%2e%2e", "..%5ckeys", "%00", "file-%0a", "keys", "x" * 3000, "%F0%9F%99%82"]
)
@pytest.mark.parametrize("route", ["files", "batches", "responses", "models"])
def test_a_forged_name_in_a_path_finds_nothing(server: Served, route: str, name: str) -> None:
    for method, tail in (("GET", ""), ("DELETE", ""), ("GET", "/content"), ("POST", "/cancel")):
        host, _, port = server.http_url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
        with contextlib.closing(connection):
            headers = {"authorization": f"Bearer {ATTACKER}", "content-type": "application/json"}
            body = "{}" if method == "POST" else None
            connection.request(method, f"/v1/{route}/{name}{tail}", body, headers)
            answer = connection.getresponse()
            text = answer.read()
        # 307: without the slash at the end, where there is nothing either.
        assert answer.status in (307, 400, 404, 405), (answer.status, text)
        assert ATTACKER.encode() not in text and b"Traceback" not in text
    assert others_answer(server) == "bcd"


def test_bodies_that_never_end_leave_room_for_others(server: Served) -> None:
    """Of the room for all bodies a part is for keys that have little of it, and it is free when the connections are."""
    before = Remains.now()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            raw = stack.enter_context(connect(server))
            raw.sendall(head(COMPLETIONS, 90_000))
            with contextlib.suppress(OSError):  # it was refused, and the connection closed
                raw.sendall(b"x" * 80_000)
        wait_until(lambda: is_full(server), "the attacker has filled its part of the room")
        assert others_answer(server) == "bcd"
    assert_at_rest(server, before)
    wait_until(lambda: not is_full(server), "what has left gives its room back")


def is_full(parts: Served) -> bool:
    with calling(parts, ATTACKER) as client:
        answer = client.post(COMPLETIONS, json={**ASK, "user": "x" * 80_000})
    if answer.status_code == 503:
        assert "serve.http.max_bodies_bytes" in answer.json()["error"]["message"]
    return answer.status_code == 503


def test_a_line_of_a_batch_may_have_no_more_than_a_body(server: Served) -> None:
    line = {"custom_id": "1", "method": "POST", "url": COMPLETIONS, "body": {**ASK, "metadata": {"a": [[]] * 30_000}}}
    before = Remains.now()
    with calling(server, ATTACKER) as client:
        for data, status in ((json.dumps(line).encode(), 200), (b"x" * 160_000, 413)):
            answer = client.post("/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"})
            assert answer.status_code == status, answer.text
            if status == 413:
                assert "serve.http.batch_file_bytes" in answer.json()["error"]["message"]
                continue
            made = {"input_file_id": answer.json()["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
            batch = client.post("/v1/batches", json=made).json()["id"]
            wait_until(lambda: client.get(f"/v1/batches/{batch}").json()["status"] == "failed", "it fails")  # noqa: B023
            [error] = client.get(f"/v1/batches/{batch}").json()["errors"]["data"]
            assert "serve.http.max_body_bytes" in error["message"]
    assert others_answer(server) == "bcd"
    assert_at_rest(server, before)


def with_sampling(**options: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", sampling=pb.SamplingParams(**options))


@pytest.mark.parametrize(
    ("method", "message", "code", "text"),
    [
        ("Abort", pb.AbortRequest(request_ids=["a"] * 4097), "INVALID_ARGUMENT", "4096"),
        ("Generate", pb.GenerateRequest(text="a", request_id="x" * 257), "INVALID_ARGUMENT", "256"),
        ("Generate", with_sampling(n=129), "INVALID_ARGUMENT", "serve.max_n"),
        ("Generate", with_sampling(stop=[*"abcde"]), "INVALID_ARGUMENT", "serve.max_stops"),
        ("Generate", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 10_000)), "INVALID_ARGUMENT", "512"),
        ("Generate", pb.GenerateRequest(text="a" * 5_000_000), "RESOURCE_EXHAUSTED", "4194304"),
        ("Tokenize", pb.TokenizeRequest(text="a" * 5_000_000), "RESOURCE_EXHAUSTED", "4194304"),
    ],
    ids=["abort", "id", "n", "stop", "prompt", "message", "text"],
)
def test_more_than_the_limit_is_refused_over_grpc(
    server: Served, method: str, message: Any, code: str, text: str
) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_stream(f"/jaxserve.v1.Inference/{method}")
        metadata = (("authorization", f"Bearer {ATTACKER}"),)
        with pytest.raises(grpc.RpcError) as refused:
            list(call(message.SerializeToString(), timeout=WAIT_S, metadata=metadata))
    assert isinstance(refused.value, grpc.Call)
    assert (refused.value.code().name, text in (refused.value.details() or "")) == (code, True), refused.value.details()
    assert others_answer(server) == "bcd"


def test_streams_that_nobody_reads_end_with_their_connections(tmp_path: Path) -> None:
    with guarded(serve_slowly(), tmp_path) as parts:
        others_answer(parts)
        leave_unread(parts)  # also starts all threads that the server starts when it needs them
        wait_until(lambda: parts.engine.num_live == 0, "they have ended")
        before = Remains.now()
        leave_unread(parts)
        assert_at_rest(parts, before)


def leave_unread(parts: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": LONG_TOKENS, "stream": True, "logprobs": 5}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            raw = stack.enter_context(connect(parts))
            raw.sendall(head(COMPLETIONS, len(body)) + body)
        wait_until(lambda: parts.engine.num_live == 4, "they run")
        assert others_answer(parts) == "bcd"


def connect(parts: Served) -> socket.socket:
    host, _, port = parts.http_url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def head(path: str, length: int) -> bytes:
    lines = f"POST {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {ATTACKER}"
    return "\r\n".join((*lines, "content-type: application/json", f"content-length: {length}", "", "")).encode()


def test_options_of_a_million_items_are_counted_before_they_are_read() -> None:
    class Read(int):
        def __hash__(self) -> int:
            raise AssertionError("it was read")

        __lt__ = __le__ = __gt__ = __ge__ = __hash__  # type: ignore[assignment]

    for options, text in (
        ({"stop_token_ids": [Read(1)] * 1000}, "1000 stop_token_ids; at most"),
        ({"bad_words": ["", *["a"] * 1000]}, "1001 bad_words; at most"),
        ({"logit_bias": dict.fromkeys(range(1000), "no number")}, "logit_bias has 1000 entries; at most"),
    ):
        with pytest.raises(UnsupportedOption, match=text):
            SamplingParams(**options)  # pyright: ignore[reportArgumentType]


def test_an_id_that_is_allowed_a_million_times_is_kept_once() -> None:
    assert SamplingParams(allowed_token_ids=[7, 3, 7] * 300_000).allowed_token_ids == (7, 3)
    for wrong in (True, -1, 1.0, "1"):
        with pytest.raises(InvalidRequest, match="allowed_token_ids must hold token ids"):
            SamplingParams(allowed_token_ids=[1, wrong])  # pyright: ignore[reportArgumentType]
