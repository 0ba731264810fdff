"""The outermost layer: every answer is counted, and carries the id that its caller gave it. A refusal without one gets
an id here, by which its caller can ask and its line in the log is found.

The reason of a refusal is part of the answer itself, see `errors.ErrorAnswer`.
"""

import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.serve.counts import HTTP, OTHER, DoorCounts, Refusal
from jaxserve.serve.http.errors import REASON

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_LEFT = 499  # nginx's number for it
_ID = re.compile(r"[!-~]{1,256}")


class Counted:
    """Middleware. `routes` are those of the application, whose paths are the labels."""

    def __init__(self, app: ASGIApp, counts: DoorCounts, routes: Sequence[Route]) -> None:
        self._app = app
        self._counts = counts
        self._paths = frozenset(route.path for route in routes)
        for route in routes:
            for method in sorted(route.methods or ()):
                counts.http.setdefault((method, route.path, "200"), 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, call_id = _CLIENT_LEFT, caller_id(Headers(scope=scope))
        begin_s = time.monotonic()

        async def watched_send(message: Message) -> None:
            nonlocal status, call_id
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                if call_id is None:
                    call_id = headers.get("x-request-id")  # the answer's own
                if call_id is None and REASON in scope:
                    call_id = uuid.uuid4().hex
                if call_id is not None:
                    headers["x-request-id"] = call_id
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else OTHER
            route = self._label(scope)
            self._counts.note_http(method, route, status, time.monotonic() - begin_s)
            if REASON in scope:
                self._counts.note_refusal(Refusal(HTTP, scope[REASON], str(status), route, call_id))

    def _label(self, scope: Scope) -> str:
        """The route's path as it was declared. A call refused before it was routed is looked up by its own path."""
        route = scope.get("route")
        path: str = route.path if isinstance(route, Route) else scope["path"]
        return path if path in self._paths else OTHER


def caller_id(headers: Headers) -> str | None:
    """The `X-Request-Id` of a call; None without one, or for one that is no visible ASCII of at most 256 characters."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else None
