"""The reader of bodies: JSON only, of bounded depth; and the errors that every route declares.

JSON is UTF-8, as a rule; UTF-16, UTF-32 and a mark of the order of bytes are seen by the first bytes (RFC 4627, 3), as
Python's own parser does. pydantic validates. Its parser is used rather than Python's, since it has a limit of depth,
refuses lone surrogates and NaN, and takes a tenth of the time.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute

from jaxserve.engine.interpreter import collector_paused
from jaxserve.serve.http.errors import ErrorResponse, HttpRefusal

# For the OpenAPI document.
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "Refused; the message says why."},
    503: {"model": ErrorResponse, "description": "The engine is stopping or has died."},
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with `stream` its events, the last of which is `[DONE]`.",
        "content": {"text/event-stream": {}},
    }
}


def read_json(octets: bytes) -> Any:
    """JSON in any of its encodings. Raises ValueError."""
    encoding = json.detect_encoding(octets)
    text = octets if encoding == "utf-8" else octets.decode(encoding)
    return pydantic_core.from_json(text, allow_inf_nan=False)


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            with collector_paused():  # the parser holds the interpreter lock, so no other thread runs meanwhile
                return read_json(body)
        except ValueError as error:
            raise _Unreadable(f"the body is no JSON that can be read: {error}") from error


class _Unreadable(HttpRefusal):
    """FastAPI lets no other exception of a body through than its own; see `JsonRoute`."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


class JsonRoute(APIRoute):
    """A route whose body is read as above, and is refused when it does not say that it is JSON.

    Browsers let a page of any origin send texts and forms to any server, without asking that server first.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if request.method == "POST" and not _says_json(request.headers.get("content-type", "")):
                raise HttpRefusal(
                    415, "the body must be JSON and say so; send the header 'content-type: application/json'"
                )
            try:
                return await handler(_JsonRequest(request.scope, request.receive))
            except Exception as error:
                # FastAPI wraps what reading a body raises into a text of its own, which says less.
                if isinstance(error.__cause__, _Unreadable):
                    raise error.__cause__ from None
                raise

        return handle


def _says_json(content_type: str) -> bool:
    """As in FastAPI, which would read any other body as one long string."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
