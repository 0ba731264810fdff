"""Clients that ask for large answers and do not read them: what is held for them is bounded, and others are served."""

import asyncio
import contextlib
import json
import socket
from urllib.parse import urlsplit

import pytest
from http_parts import browse
from serve_parts import WAIT_S, Served, serve_bytes, served, wait_until

from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.engine.shared_room import SharedRoom
from jaxserve.serve.http.errors import HttpRefusal
from jaxserve.serve.http.pieces import ANSWERS, AnswersRoom, send_parts

COUNT = 3_000_000
TEXT = {"prompt": "a" * COUNT}  # an answer of 9 MB, more than buffers of the system hold
MOST = 18_000_000  # two answers, as far as buffers of the system do not hold them


def ask(stack: contextlib.ExitStack, parts: Served) -> socket.socket:
    """Asks for the answer and reads its first bytes alone: then all of it has been made."""
    address = urlsplit(parts.http_url)
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(WAIT_S)
    client.connect((address.hostname, address.port))
    body = json.dumps(TEXT).encode()
    head = (
        f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


def test_answers_that_nobody_reads_are_bounded() -> None:
    http = HttpConfig(port=0, max_answers_bytes=MOST, allowed_hosts=["*"])
    server = served(serve_bytes(), grpc_config=GrpcConfig(port=None), http_config=http, max_text_chars=COUNT)
    with server as parts, browse(parts) as others:
        with contextlib.ExitStack() as stack:
            first, second = (ask(stack, parts) for _ in range(2))
            refused = others.post("/tokenize", json=TEXT)
            assert refused.status_code == 503, refused.text[:1000]
            message = refused.json()["error"]["message"]
            assert "serve.http.max_answers_bytes" in message and str(MOST) in message
            assert others.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
            assert read_whole(first).count(b"97,") == COUNT - 1
            assert others.post("/tokenize", json=TEXT).status_code == 200
            second.close()
        wait_until(lambda: others.post("/tokenize", json=TEXT).status_code == 200, "the others have left")


def read_whole(client: socket.socket) -> bytes:
    """The rest of an answer, which ends a list and the object that has it."""
    found = bytearray()
    while not found.endswith(b"]}"):
        part = client.recv(2**20)
        assert part, "the connection has ended before the answer"
        found += part
    return bytes(found)


def test_parts_have_their_room_until_they_are_sent() -> None:
    room: SharedRoom[str] = SharedRoom(100)
    scope = {ANSWERS: AnswersRoom(room, "me")}
    held: list[int] = []

    async def send(message: object) -> None:
        held.append(room.total)

    async def fail(message: object) -> None:
        raise OSError("gone")

    asyncio.run(send_parts(scope, [b"x" * 20, b"x" * 30, b"x"], send, more=False))
    assert held == [51, 31, 1] and room.total == 0
    with pytest.raises(OSError, match="gone"):
        asyncio.run(send_parts(scope, [b"x", b"y"], fail, more=False))
    assert room.total == 0
    assert room.enter("me", 99)
    with pytest.raises(HttpRefusal, match=r"10 bytes.* 100 bytes .*max_answers_bytes.* yours have 99"):
        asyncio.run(send_parts(scope, [b"x" * 5, b"x" * 5], send, more=False))
    asyncio.run(send_parts(scope, [b"x" * 50], send, more=False))  # what is small needs none
    assert room.total == 99
