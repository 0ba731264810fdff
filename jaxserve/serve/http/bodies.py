"""The reader of bodies: JSON only, of bounded depth and number of parts; and the errors that every route declares.

JSON is UTF-8, as a rule; UTF-16, UTF-32 and a mark of the order of bytes are seen by the first bytes (RFC 4627, 3), as
Python's own parser does. pydantic validates. Its parser is used rather than Python's, since it has a limit of depth,
refuses lone surrogates and NaN, and takes a tenth of the time. Large bodies are read by `LargeReads`, in pieces.
"""

import functools
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from jaxserve.serve.http.errors import ErrorResponse, HttpRefusal, invalid_body
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.http.large_json import parse_json
from jaxserve.serve.http.marks import Mark, note
from jaxserve.serve.http.requests import Body, field_names
from jaxserve.serve.large_reads import LARGE_BYTES, LargeReads
from jaxserve.text.json_size import has_more_parts

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


def read_json(octets: bytes, max_parts: int) -> Any:
    """JSON in any of its encodings. Raises ValueError, also for more than `max_parts` (`serve.http.max_json_parts`)."""
    encoding = json.detect_encoding(octets)
    text = octets if encoding == "utf-8" else octets.decode(encoding)
    if has_more_parts(max_parts, text):
        raise ValueError(
            f"it has more than {max_parts} objects, lists and fields together (serve.http.max_json_parts); send less"
        )
    return parse_json(text.encode() if isinstance(text, str) else text)


class _JsonRequest(Request):
    """`kind`: the model of its body, which is validated here, so that the fields that it ignores can be noted."""

    def __init__(self, scope: Scope, receive: Receive, kind: type[Body] | None) -> None:
        super().__init__(scope, receive)
        self._kind = kind

    async def json(self) -> Any:
        body = await self.body()
        read = functools.partial(_read, body, self._kind, self.app.state.max_json_parts)
        if len(body) > LARGE_BYTES:
            reads: LargeReads = self.app.state.large_reads
            given, marks = await reads.run(owner_of(self).id, read)
        else:
            given, marks = read()
        if marks:
            note(self.app.state.counts, self.scope["route"].path, marks)
        return given


def _read(octets: bytes, kind: type[Body] | None, max_parts: int) -> tuple[Any, set[Mark]]:
    """A body, as JSON or as its model, and the fields that are ignored. Raises Unreadable. Any thread."""
    try:
        given = read_json(octets, max_parts)
    except ValueError as error:
        raise Unreadable(HttpRefusal(400, f"the body is no JSON that can be read: {error}")) from error
    marks: set[Mark] = set()
    if kind is None:
        return given, marks
    try:
        return kind.model_validate(given, context=marks), marks
    except pydantic.ValidationError as error:
        problems = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise Unreadable(invalid_body(problems, field_names(kind))) from error


class Unreadable(Exception):
    """A body that cannot be read. FastAPI wraps every exception of a body but its own; `answer` raises the refusal."""

    def __init__(self, refusal: HttpRefusal) -> None:
        super().__init__(str(refusal))
        self._code, self._param, self._kind = refusal.code, refusal.param, refusal.kind

    def refusal(self) -> HttpRefusal:
        """What the client is told; a new one each time, since this one's traceback holds the body."""
        return HttpRefusal(self._code, str(self), param=self._param, kind=self._kind)


async def answer(handler: Callable[[Request], Coroutine[Any, Any, Response]], call: Request) -> Response:
    """What FastAPI's handler of a route answers. Raises HttpRefusal for a body that is `Unreadable`.

    FastAPI keeps its errors in a variable of the function that raises them. Such an error and its traceback hold each
    other, and with them the body, until a collection of garbage: of which there are few beside a working engine. So
    the traceback goes here.
    """
    try:
        return await handler(call)
    except RequestValidationError as error:
        raise error.with_traceback(None)  # noqa: B904 (the same)
    except HTTPException as error:
        if not isinstance(error.__cause__, Unreadable):
            raise
        unreadable = error.__cause__.with_traceback(None)
        error.with_traceback(None).__cause__ = error.__context__ = None
    raise unreadable.refusal()


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
            return await answer(handler, _JsonRequest(request.scope, request.receive, self._kind()))

        return handle

    def _kind(self) -> type[Body] | None:
        """The model of the body, where it is one of `requests`."""
        kind = None if self.body_field is None else self.body_field.field_info.annotation
        return kind if isinstance(kind, type) and issubclass(kind, Body) else None


def _says_json(content_type: str) -> bool:
    """As in FastAPI, which would read any other body as one long string."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
