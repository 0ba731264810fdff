"""Around every request: its body within limits, its end when the client leaves, no exception that escapes.

Bodies are read here, and a client that disappears is noticed. Written as plain ASGI, since a middleware that wraps
responses would hide a disconnect behind its own buffers: here a closed connection cancels the handler itself, leaving
the engine's stream, which aborts the request within a step.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.engine.shared_room import SharedRoom
from jaxserve.errors import DeadlineExceeded
from jaxserve.serve.http.errors import HttpRefusal, error_response
from jaxserve.serve.http.keys import OWNER
from jaxserve.serve.http.pieces import ANSWERS, AnswersRoom
from jaxserve.serve.owners import Owner

FILES = "/v1/files"  # files of batches are uploaded there, whose bodies are larger than others

_BODIES_READ, _READ_ON_S = 16, 5.0  # of a body that is too large: times the limit, and for how long
_PLAIN = b"identity"  # some hundred bytes that are packed could be megabytes
_GRACE_S = 10.0  # beyond the limit of an answer, for a client that does not read it


class Guard:
    """Middleware. `max_body_bytes`, `max_bodies_bytes`, `max_answers_bytes`, `body_timeout_s` and `request_timeout_s`
    as in the config; `larger`: of some paths the most bytes of a body, and the setting that says so; `find_owner`:
    whose call it is, which is noted in its scope."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        max_bodies_bytes: int,
        max_answers_bytes: int,
        body_timeout_s: float,
        request_timeout_s: float,
        larger: Mapping[str, tuple[int, str]],
        find_owner: Callable[[Scope], Owner],
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._room: SharedRoom[str] = SharedRoom(max_bodies_bytes)  # for bodies of requests that have not ended
        self._answers: SharedRoom[str] = SharedRoom(max_answers_bytes)  # for answers that clients have not taken
        self._find_owner = find_owner
        self._larger = larger
        self._body_timeout_s = body_timeout_s
        self._request_timeout_s = request_timeout_s
        self._num_live = 0

    @property
    def num_live(self) -> int:
        """POST requests that have not ended. Others are answered at once, or are views that never end."""
        return self._num_live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        weight = int(scope["method"] == "POST")
        self._num_live += weight
        try:
            await self._answer(scope, receive, send)
        finally:
            self._num_live -= weight

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[OWNER] = found = self._find_owner(scope)
        owner = found.id
        scope[ANSWERS] = AnswersRoom(self._answers, owner)
        try:
            body = await self._read_body(scope, receive, owner)
        except HttpRefusal as refusal:
            response = error_response(refusal)
            response.headers["connection"] = "close"  # the rest of the body is not taken for a request
            if refusal.code in (413, 415):
                await self._answer_and_read_on(response, scope, receive, send)
            else:
                await response(scope, receive, send)
            return
        if body is None:
            return
        try:
            await self._answer_body(body, scope, receive, send)
        finally:
            self._room.leave(owner, len(body))

    async def _answer_body(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched_send(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        # A call that is no POST is a page, or a view that lasts as long as its viewer stays.
        limit_s = self._request_timeout_s + _GRACE_S if scope["method"] == "POST" else None
        work = asyncio.ensure_future(self._app(scope, _replay(body), watched_send))
        gone = asyncio.ensure_future(_until_gone(receive))
        done: set[asyncio.Task[None]] = set()
        try:
            done, _ = await asyncio.wait({work, gone}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
        error = time_is_up(self._request_timeout_s) if not done else None if work.cancelled() else work.exception()
        if error is not None and not begun:
            assert isinstance(error, Exception), error
            await error_response(error)(scope, receive, send)

    async def _answer_and_read_on(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer at once, but its end, which closes the connection, when the body is here or long enough.

        Many clients send all of a body before they read (Python's urllib, node). A connection that is closed with
        bytes unread is reset, and the reset overtakes the answer.
        """

        async def send_all_but_the_end(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await response(scope, receive, send_all_but_the_end)
        left = self._max_body_bytes * _BODIES_READ
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_READ_ON_S, self._body_timeout_s)):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        await send({"type": "http.response.body", "body": b""})

    async def _read_body(self, scope: Scope, receive: Receive, owner: str) -> bytes | None:
        """The whole body, which counts until its request ends; None when the client left before its end. Raises
        HttpRefusal."""
        encoding = next((value for name, value in scope["headers"] if name == b"content-encoding"), _PLAIN)
        if encoding.strip().lower() != _PLAIN:
            text = f"a body with the content encoding {encoding[:80].decode('latin-1')!r} is not taken; send it plain"
            raise HttpRefusal(415, text)
        limit, setting = self._larger.get(scope["path"], (self._max_body_bytes, "serve.http.max_body_bytes"))
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(int(declared), limit, setting)
        parts: list[bytes] = []
        size, whole = 0, False  # of the parts that have their room
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    if size + len(part) > limit:
                        raise _too_large(size + len(part), limit, setting)
                    # One body alone is read, whatever it has: its own limit is another setting.
                    if not self._room.enter(owner, len(part), at_any_rate=self._room.total == size):
                        raise _too_many(self._room, owner)
                    size += len(part)
                    parts.append(part)
                    if not message.get("more_body", False):
                        whole = True
                        return b"".join(parts)
        except TimeoutError as error:
            text = f"the body did not arrive within {self._body_timeout_s:g} s (serve.http.body_timeout_s); send faster"
            raise HttpRefusal(408, text) from error
        finally:
            if not whole:
                self._room.leave(owner, size)


def time_is_up(limit_s: float) -> DeadlineExceeded:
    """The error of an answer that takes too long."""
    return DeadlineExceeded(
        f"the answer was not complete within {limit_s:g} s (serve.http.request_timeout_s); ask for fewer tokens"
    )


def _too_large(size: int, limit: int, setting: str) -> HttpRefusal:
    text = f"the body has {size} bytes or more; at most {limit} are taken ({setting}); send less"
    return HttpRefusal(413, text)


def _too_many(room: SharedRoom[str], owner: str) -> HttpRefusal:
    text = (
        f"there is no room for this body: those of all requests have {room.total} bytes and yours {room.held(owner)}; "
        f"together they may have {room.most} (serve.http.max_bodies_bytes), and while these are taken a caller may "
        f"have {room.part(owner)}; try again later"
    )
    return HttpRefusal(503, text)


def _replay(body: bytes) -> Receive:
    """A `receive` of the body read so far; then it waits, since the guard itself watches for the connection's end."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.get_running_loop().create_future()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
