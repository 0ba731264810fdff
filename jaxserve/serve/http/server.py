"""The HTTP server: one port, on the event loop that the other doors share.

This is the transport, TLS included, with limits of time and size on headers. Signals are handled in `service`, the
bound on connections in `connections`.

uvicorn limits neither the time in which a request's headers arrive nor their size, so a client that sends a byte now
and then would hold a connection for ever. The protocol below counts both; bodies are `guard`'s, but for the chunks that
they come in: the parser tells of each, on the event loop, so that a megabyte in chunks of one byte is a second. A
request that comes before the answer to another (pipelining, which no common client does) is not taken, and the
connection ends with that answer: uvicorn would stop to read, and so not notice that the client has left.

Nor does uvicorn tell apart a client that will send no more from one that has left (`half_closed`), or send streams
without chunks to clients of HTTP/1.0 (`http10`).
"""

import asyncio
import contextlib
import dataclasses
import socket
import ssl
import sys
from collections.abc import Generator
from typing import NamedTuple

import httptools
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from jaxserve.config.addresses import address_of
from jaxserve.errors import ConfigError
from jaxserve.serve.counts import HTTP, HTTP_REASONS, OTHER, DoorCounts, Refusal
from jaxserve.serve.http.connections import Acceptor, Client, Connections
from jaxserve.serve.http.errors import plain_error
from jaxserve.serve.http.half_closed import HalfClosed
from jaxserve.serve.http.http10 import Unchunked
from jaxserve.serve.http.keys import PROBES
from jaxserve.serve.ports import HeldPort

MAX_HEADER_BYTES = 64 * 2**10
MAX_URL_BYTES = 16 * 2**10
FREE_CHUNKS, MIN_CHUNK_BYTES = 1000, 64  # of a body: so many may have any size, the others this much on average
_PROBES = frozenset(path.encode() for path in PROBES)
_KEEP_ALIVE_S = 75  # longer than the 60 s of common balancers, which must be the ones to close
_BACKLOG = 1024
_USER_TIMEOUT_MS = 30_000  # for sent bytes to be acknowledged
_POLL_S = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """The common state of all connections of a port."""

    header_timeout_s: float
    connections: Connections
    counts: DoorCounts


class _Refused(NamedTuple):
    """The answer to bytes that never become a request."""

    code: int
    phrase: str
    text: str


class TimedProtocol(HttpToolsProtocol, Client):
    """Closes connections whose headers are late or large. One per connection."""

    def __init__(self, port: Port, config: uvicorn.Config, server_state: ServerState) -> None:
        super().__init__(config=config, server_state=server_state, app_state={}, _loop=asyncio.get_running_loop())
        self._port = port
        self._refused: _Refused | None = None  # said by a callback of the parser, which can only raise
        self._half_closed: HalfClosed | None = None
        self._whole_app, self.app = self.app, self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, as the version of the request needs it."""
        send = Unchunked(self.cycle).send if scope["http_version"] == "1.0" else send
        await self._whole_app(scope, receive, send)  # pyright: ignore[reportArgumentType]

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._header_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._repeating = False  # see `_stay_with_http1`
        self._num_chunks = self._body_bytes = 0  # of the request that is being read
        self._ahead = False  # a request came before the answer to another; from then on nothing is taken
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_are_here()
        if self._half_closed is not None:
            self._half_closed.cancel()
        self._port.connections.remove(self)
        super().connection_lost(exc)
        self.app = self._whole_app  # a method of its own would keep it until the next collection

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether the connection stays open: for the answer to a whole request. With TLS asyncio closes it anyway."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or self.scheme == "https":
            return False
        cycle.keep_alive = False  # its end closes the connection
        self._half_closed = HalfClosed(self.transport, cycle, self.abandon)
        return True

    def abandon(self) -> None:
        """See `Client`."""
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._ahead:
            return
        if self._deadline is not None:
            self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(self._refused or _Refused(400, "Bad Request", f"this is no HTTP/1.1: {error}"))
            return
        # Checked afterwards: the headers may have ended in this piece, and the rest of it is body.
        if self._deadline is not None and self._header_bytes > MAX_HEADER_BYTES:
            text = f"headers of more than {MAX_HEADER_BYTES} bytes"
            self._refuse(_Refused(431, "Request Header Fields Too Large", text))

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
        follows for another protocol. So another parser goes on, which is given only the length of the body.
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
        self._num_chunks = self._body_bytes = 0
        if self._deadline is None:
            self._header_bytes = 0
            self._expect_headers()

    def on_url(self, url: bytes) -> None:
        if self._repeating or self._ahead:
            return
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refused = _Refused(414, "URI Too Long", f"a URL of more than {MAX_URL_BYTES} bytes")
            raise ValueError(self._refused.text)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._repeating and not self._ahead:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._repeating or self._ahead:
            return
        self._headers_are_here()
        connections = self._port.connections
        is_spare = connections.is_spare(self)
        if is_spare and self.url.partition(b"?")[0] not in _PROBES:
            text = f"all {connections.most} connections are busy (serve.http.max_connections); try again later"
            self._refused = _Refused(503, "Service Unavailable", text)
            raise ValueError(text)
        super().on_headers_complete()
        if is_spare:
            self.cycle.keep_alive = False
        connections.begin(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._port.connections.rest(self)

    def on_chunk_header(self) -> None:
        """Called by the parser at each chunk of a body that has no length."""
        if self._ahead:
            return
        self._num_chunks += 1
        if self._body_bytes < (self._num_chunks - FREE_CHUNKS - 1) * MIN_CHUNK_BYTES:
            text = (
                f"a body has more than {FREE_CHUNKS} chunks, and the others less than {MIN_CHUNK_BYTES} bytes each; "
                "send larger ones, or the length of the body"
            )
            self._refused = _Refused(400, "Bad Request", text)
            raise ValueError(text)

    def on_body(self, body: bytes) -> None:
        if not self._ahead:
            self._body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ahead and not self.parser.should_upgrade():  # else see `_stay_with_http1`
            super().on_message_complete()

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(self._port.header_timeout_s, self._too_late)

    def _headers_are_here(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        text = f"the headers did not arrive within {self._port.header_timeout_s:g} s"
        self._refuse(_Refused(408, "Request Timeout", text))

    def _refuse(self, refused: _Refused) -> None:
        self._headers_are_here()
        if self.transport.is_closing():
            return
        cycle, code = self.cycle, refused.code
        is_of_body = cycle is not None and cycle.more_body and not cycle.response_started
        if is_of_body or cycle is None or cycle.response_complete:  # nothing of an earlier request is under way
            if not is_of_body:  # else the call is counted as one whose client has left
                self._port.counts.note_http(OTHER, OTHER, code)
            self._port.counts.note_refusal(Refusal(HTTP, HTTP_REASONS[code], str(code), OTHER, None))
            body = plain_error(code, refused.text)
            head = f"HTTP/1.1 {code} {refused.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            head += "retry-after: 1\r\n" if code == 503 else ""
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    """Without the signal handlers: the process has its own, for all doors together."""

    def __init__(self, config: uvicorn.Config, port: Port, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.servers = []
        self._port = port
        self._tls = tls
        self._acceptors: list[Acceptor] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, with the acceptor of `connections`."""
        assert sockets is not None, "the port is bound by `HttpServer`"

        def make() -> TimedProtocol:
            return TimedProtocol(self._port, self.config, self.server_state)

        for listener in sockets:
            port = self._port
            self._acceptors.append(Acceptor(listener, make, port.connections, self._tls, port.header_timeout_s))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, then shuts down as uvicorn does."""
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)


class HttpServer:
    """One listening port. Used on one event loop."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int | HeldPort,
        header_timeout_s: float,
        max_connections: int,
        counts: DoorCounts,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """A `port` that is not held is taken at the start. `tls` None: in the clear. `header_timeout_s` is the limit of
        its handshake, too.
        """
        self._host = host
        self._port = port
        config = uvicorn.Config(
            app,
            http=TimedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        shared = Port(header_timeout_s=header_timeout_s, connections=Connections(max_connections), counts=counts)
        self._server = _Uvicorn(config, shared, tls)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens. Returns the port. Raises ConfigError when the address cannot be bound."""
        listener = self._listen()
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="jaxserve-http")
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(_POLL_S)
        return port

    async def stop(self, grace_s: float) -> None:
        """After `grace_s` closes the port, gives open answers a second more, then cuts them."""
        if self._task is not None:
            await asyncio.sleep(grace_s)
            self._server.should_exit = True
            await self._task

    def _listen(self) -> socket.socket:
        held = self._port if isinstance(self._port, HeldPort) else HeldPort(self._host, self._port, "serve.http.port")
        listener = held.take()
        # Accepted connections inherit these. A client whose network is cut says nothing: the system asks instead, and
        # the end of the connection is what aborts its request.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option, seconds in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                listener.setsockopt(socket.IPPROTO_TCP, option, seconds)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        try:
            listener.listen(_BACKLOG)
        except OSError as error:  # another process was faster
            listener.close()
            raise ConfigError(f"cannot listen on {address_of(self._host, held.number)}: {error}") from error
        listener.setblocking(False)
        return listener
