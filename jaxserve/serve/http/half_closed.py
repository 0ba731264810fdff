"""A client that has closed its sending side alone, and waits for its answer (RFC 9293, 3.6); or that has gone.

The system reports both in the same way, as the end of what the client sends. Only bytes that are sent to it tell them
apart: a client that has gone answers with a reset. Streams send enough by themselves. Before an answer has begun,
interim responses are sent, of which a client of HTTP/1.1 takes any number (RFC 9110, 15.2). They begin after a moment,
in which most answers are there and no client sees one.
"""

import asyncio
import socket
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_S, _REPLY_S, _PAUSE_S = 0.5, 0.1, 5.0  # until the first is sent, until the reset of it is here, between two


class HalfClosed:
    """Watches one such connection until its answer is complete, or `cancel`. Used on one event loop."""

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle, gone: Callable[[], None]) -> None:
        """`cycle`: of the request that was sent before; `gone` is called when the client has left."""
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._cycle = cycle
        self._gone = gone
        self._timer = self._loop.call_later(_FIRST_S, self._probe)

    def cancel(self) -> None:
        """Watches no more. May be called twice."""
        self._timer.cancel()

    def _probe(self) -> None:
        if self._cycle.response_complete or self._transport.is_closing():
            return
        if not self._cycle.response_started and self._cycle.scope["http_version"] == "1.1":
            self._transport.write(_CONTINUE)
        self._timer = self._loop.call_later(_REPLY_S, self._look)

    def _look(self) -> None:
        # Nothing reads from the socket any more, so its errors must be asked for.
        connected: socket.socket = self._transport.get_extra_info("socket")
        if not self._transport.is_closing() and connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._gone()
        else:
            self._timer = self._loop.call_later(_PAUSE_S, self._probe)
