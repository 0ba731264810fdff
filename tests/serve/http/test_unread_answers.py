"""Clients that ask for large answers and do not read them: what is held for them is bounded, and others are served."""

import asyncio
import contextlib
import json
import socket
from urllib.parse import urlsplit

import pytest
from http_parts import browse, http_served
from serve_parts import WAIT_S, Served, serve_bytes, wait_until

from jaxserve.engine.shared_room import SharedRoom
from jaxserve.serve.http.errors import HttpRefusal
from jaxserve.serve.http.pieces import ANSWERS, AnswersRoom, send_parts

TEXT = {"prompt": "a" * 3_000_000}  # an answer of 9 MB, more than buffers of the system hold
MOST = 24_000_000  # of which three quarters are for anybody: two answers


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
    with http_served(serve_bytes(), max_answers_bytes=MOST, allowed_hosts=["*"]) as parts, browse(parts) as others:
        with contextlib.ExitStack() as stack:
            first, second = (ask(stack, parts) for _ in range(2))
            refused = others.post("/tokenize", json=TEXT)
            assert refused.status_code == 503, refused.text[:1000]
            message = refused.json()["error"]["message"]
            assert "serve.http.max_answers_bytes" in message and str(MOST) in message
            assert others.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
            assert read_whole(first).count(b"97,") == 3_000_000 - 1
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
    room = SharedRoom(100)
    scope = {ANSWERS: AnswersRoom(room, 100, b"me")}
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
    assert room.enter(b"me", 70)
    with pytest.raises(HttpRefusal, match=r"10 bytes.* 100 bytes .*max_answers_bytes.* yours have 70"):
        asyncio.run(send_parts(scope, [b"x" * 5, b"x" * 5], send, more=False))
    asyncio.run(send_parts(scope, [b"x" * 50], send, more=False))  # what is small needs none
    assert room.total == 70
