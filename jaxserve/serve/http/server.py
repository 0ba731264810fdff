"""The HTTP server: one port, on the event loop that the other doors share.

Owns the transport, TLS included, and its limits of time and size on headers. Refuses signals, which are `service`'s,
and routes.

uvicorn limits neither the time in which a request's headers arrive nor their size, so a client that sends a byte now
and then would hold a connection for ever. The protocol below counts both; bodies are `guard`'s. A request that comes
before the answer to another (pipelining, which no common client does) is not taken, and the connection ends with that
answer: uvicorn would stop to read, and so not notice that the client has left.
"""

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import Generator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxserve.errors import ConfigError
from jaxserve.serve.http.errors import plain_error

MAX_HEADER_BYTES = 64 * 2**10
_KEEP_ALIVE_S = 75  # longer than the 60 s of common balancers, which must be the ones to close
_BACKLOG = 1024
_USER_TIMEOUT_MS = 30_000  # for what was sent to be acknowledged
_POLL_S = 0.01


class TimedProtocol(HttpToolsProtocol):
    """Closes connections whose headers are late or large. Made by uvicorn, one per connection."""

    header_timeout_s = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._header_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._repeating = False  # see `_stay_with_http1`
        self._ahead = False  # a request came before the answer to another; from then on nothing is taken
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_are_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ahead:
            return
        if self._deadline is not None:
            self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(400, "Bad Request", f"this is no HTTP/1.1: {error}")
            return
        # Looked at afterwards: the headers may have ended in this piece, and the rest of it is body.
        if self._deadline is not None and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "Request Header Fields Too Large", f"headers of more than {MAX_HEADER_BYTES} bytes")

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._stay_with_http1()
                data = data[upgrade.args[0] :]
            else:
                return

    def _stay_with_http1(self) -> None:
        """Java's HttpClient and `curl --http2` offer to change to HTTP/2, and send a body as if nothing had been said.

        RFC 9110 (7.8) lets a server ignore the offer. The parser cannot: it stops after the headers, and takes what
        follows for another protocol. So another one goes on, which is told how long the body is and nothing else.
        """
        framing = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in framing)
        self.parser = httptools.HttpRequestParser(self)
        self._repeating = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
        finally:
            self._repeating = False

    def on_message_begin(self) -> None:
        if self._repeating or self._ahead:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._ahead = True
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        if self._deadline is None:
            self._header_bytes = 0
            self._expect_headers()

    def on_url(self, url: bytes) -> None:
        if not self._repeating and not self._ahead:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._repeating and not self._ahead:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._repeating and not self._ahead:
            self._headers_are_here()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._ahead:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ahead and not self.parser.should_upgrade():  # else see `_stay_with_http1`
            super().on_message_complete()

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout_s, self._too_late)

    def _headers_are_here(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._refuse(408, "Request Timeout", f"the headers did not arrive within {self.header_timeout_s:g} s")

    def _refuse(self, code: int, phrase: str, text: str) -> None:
        self._headers_are_here()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # nothing of an earlier request is under way
            body = plain_error(code, text)
            head = f"HTTP/1.1 {code} {phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    """Without the signal handlers: the process has its own, for all doors together."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._tls = tls
        self._handshake_timeout_s = None if tls is None else handshake_timeout_s

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens. Instead of uvicorn's own, which leaves the handshake of TLS to asyncio's limit of a minute."""
        assert sockets is not None, "the port is bound by `HttpServer`"
        config, loop = self.config, asyncio.get_running_loop()
        make: Any = config.http_protocol_class

        def make_protocol() -> asyncio.Protocol:
            return make(config=config, server_state=self.server_state, app_state={}, _loop=loop)

        self.servers = [
            await loop.create_server(
                make_protocol,
                sock=listener,
                backlog=_BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
            for listener in sockets
        ]
        self.started = True


class HttpServer:
    """One listening port. Used on one event loop."""

    def __init__(
        self, app: ASGIApp, *, host: str, port: int, header_timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """`tls` None: in the clear. `header_timeout_s` is the limit of its handshake, too."""
        self._host = host
        self._port = port
        if tls is not None:
            tls.set_alpn_protocols(["http/1.1"])  # who speaks HTTP/2 alone is told so by the handshake
        protocol: Any = type("_Protocol", (TimedProtocol,), {"header_timeout_s": header_timeout_s})
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Uvicorn(config, tls, header_timeout_s)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens. Returns the port. Raises ConfigError when the address cannot be had."""
        listener = self._bind()
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="jaxserve-http")
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(_POLL_S)
        return port

    async def stop(self, grace_s: float) -> None:
        """After `grace_s` closes the port, gives what is under way a second more, then cuts it."""
        if self._task is not None:
            await asyncio.sleep(grace_s)
            self._server.should_exit = True
            await self._task

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # With the protocol named, asyncio turns Nagle's algorithm off for the connections: else each event of a stream
        # waits for the client's delayed acknowledgement of the one before, 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            # Lets a restart take the port of connections that linger; a second live server still cannot.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted connections inherit these. A client whose network is cut says nothing: the system asks instead,
            # and the end of the connection is what aborts its request.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if sys.platform == "linux":
                for option, seconds in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                    listener.setsockopt(socket.IPPROTO_TCP, option, seconds)
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
            listener.bind((self._host, self._port))
            listener.listen(_BACKLOG)
        except (OSError, OverflowError) as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}: {error}; set serve.host or serve.http.port, 0 takes a "
                "free port"
            ) from error
        listener.setblocking(False)
        return listener
