"""Answers to clients of HTTP/1.0, which know no chunks: where the length is not known, the connection ends the answer.

uvicorn sends every answer without a length in chunks, and closes the connection after an answer to HTTP/1.0.
"""

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Unchunked:
    """The `send` of one request of HTTP/1.0."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._has_length = False
        cycle.waiting_for_100_continue = False  # an interim response would be taken for the answer

    async def send(self, message: Message) -> None:
        """To the cycle, which is told that each piece is as long as it should be."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._cycle.send(message)  # pyright: ignore[reportArgumentType]  # the same messages by other names
