"""The answers to an HTTP client when a request is refused or fails: the error object of the OpenAI API.

Every exception is turned into it here: routes raise typed errors, and the table in `serve.status` gives them codes.
Below `/v1/messages` the same error has the shape of Anthropic's API.
Once a stream has begun its status cannot change any more, so an error there is the last event, in the same shape.
"""

import json
import logging
import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import pydantic
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from jaxserve.errors import JaxserveError, PromptTooLong, QueueFull, Status, UnknownModel, UserError
from jaxserve.serve.counts import HTTP_REASONS, reason_of
from jaxserve.serve.http.other_routes import where_else, with_another_base
from jaxserve.serve.status import HTTP_CODES, public_message, status_of
from jaxserve.values.other_names import Place, answer

logger = logging.getLogger(__name__)

REASON = "jaxserve.reason"  # in the scope of a call that was refused; read by the layer that counts
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
MESSAGES = "/v1/messages"
_MESSAGES_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_RETRY_S = 1.0  # when the engine does not know better
_MEMBERS = frozenset({"str", "NamedTool"})  # of unions, as pydantic writes them
_MAX_PARAM = 200  # characters of a name that a client made up
_MAX_PROBLEMS = 5  # of a body with many mistakes, that a message names


class HttpRefusal(UserError):
    """A refusal that only HTTP knows: `code` is its status. `param` names the field, `kind` OpenAI's code for it."""

    def __init__(self, code: int, message: str, *, param: str | None = None, kind: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.kind = kind


class ErrorDetail(pydantic.BaseModel):
    """`code` repeats the HTTP status where OpenAI has no word of its own for the case."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorResponse(pydantic.BaseModel):
    """Body of every answer that is not 2xx."""

    error: ErrorDetail


class MessagesErrorDetail(pydantic.BaseModel):
    type: str
    message: str


class MessagesErrorResponse(pydantic.BaseModel):
    """The same in the shape of Anthropic's API."""

    type: Literal["error"]
    error: MessagesErrorDetail


def messages_error(code: int, body: ErrorResponse) -> MessagesErrorResponse:
    """An error as clients of `/v1/messages` read it."""
    kind = _MESSAGES_TYPES.get(code, "invalid_request_error" if code < 500 else "api_error")
    return MessagesErrorResponse(type="error", error=MessagesErrorDetail(type=kind, message=body.error.message))


def describe(error: Exception) -> tuple[int, ErrorResponse]:
    """Status and body for an exception. A defect is logged, and the client is only told where to look."""
    status = status_of(error)
    code = error.code if isinstance(error, HttpRefusal) else HTTP_CODES[status]
    reference = f"error {uuid.uuid4().hex[:12]}"
    if status is Status.INTERNAL:
        logger.error("a request failed, %s", reference, exc_info=error)
    param, kind = (error.param, error.kind) if isinstance(error, HttpRefusal) else (None, None)
    if isinstance(error, UnknownModel):
        param, kind = "model", "model_not_found"
    if isinstance(error, PromptTooLong):
        kind = "context_length_exceeded"  # clients that shorten a conversation look for it
    return code, _body(code, public_message(error, reference), param, kind)


class ErrorAnswer(Response):
    """An answer that carries its reason to the layers around it, and not to the client."""

    media_type = "application/json"

    def __init__(self, code: int, body: ErrorResponse, headers: Mapping[str, str] | None, reason: str) -> None:
        super().__init__(body.model_dump_json(exclude_unset=True), code, headers)
        self._error = body
        self._reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REASON] = self._reason
        if scope["path"].startswith(MESSAGES):
            self.body = messages_error(self.status_code, self._error).model_dump_json().encode()
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def http_reason(error: Exception) -> str:
    """The reason under which a refusal is counted."""
    if isinstance(error, HttpRefusal):
        return HTTP_REASONS.get(error.code, HTTP_REASONS[400])
    return reason_of(error)


def error_response(error: Exception) -> ErrorAnswer:
    """The whole answer. Where a retry makes sense, it has the time to wait."""
    code, body = describe(error)
    headers = {}
    if code in (429, 503):
        wait_s = error.retry_after_s if isinstance(error, QueueFull) else None
        headers["retry-after"] = str(max(1, math.ceil(wait_s if wait_s is not None else _RETRY_S)))
    if code == 401:
        headers["www-authenticate"] = "Bearer"
    return ErrorAnswer(code, body, headers, http_reason(error))


def json_response(body: pydantic.BaseModel, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON of the fields that were set."""
    content = body.model_dump_json(exclude_unset=True)
    return Response(content, code, headers, media_type="application/json")


def add_handlers(app: FastAPI, routes: Sequence[Route]) -> None:
    """Every exception of `app` leaves in the shape of its API. `routes`: all that it has."""
    paths = frozenset(route.path for route in routes)

    async def on_any(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), error
        return error_response(invalid_body(error.errors()))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), error
        path, text, headers = request.url.path, str(error.detail), error.headers
        if error.status_code == 404:
            here = where_else(path, paths) or with_another_base(path, paths)
            text = f"there is nothing at {path}" + (f"; {here}" if here else "")
        elif error.status_code == 405:  # Starlette names the methods of the first route of this path alone
            known = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            methods = ", ".join(sorted({method for route in known for method in route.methods or ()}))
            headers = {"allow": methods}
            text = f"{request.method} is not possible here; {where_else(path, paths) or f'{methods} is'}"
        body = _body(error.status_code, text, None, None)
        reason = HTTP_REASONS.get(error.status_code, HTTP_REASONS[400])
        return ErrorAnswer(error.status_code, body, headers, reason)

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(JaxserveError, on_any)
    app.add_exception_handler(Exception, on_any)


def invalid_body(problems: Sequence[Any], known: Collection[str] | None = None) -> HttpRefusal:
    """One sentence on pydantic's list of problems. Values are not repeated: they are the client's, and may be long.

    `known`: the fields that the body may have.
    """
    texts: dict[str, str] = {}
    for problem in problems:
        location = problem["loc"]
        name = _place(location) or "body"
        if problem["type"] == "extra_forbidden":
            name = ".".join(part for part in (_place(location[:-1]), str(location[-1])) if part)
            texts.setdefault(name, f"{name} is not a field that this server knows{_here(location, known)}")
        elif problem["type"] == "only":
            texts.setdefault(name, f"{name}: {problem['msg']}{_here(location, known)}")
        elif problem["type"] == "too_long":
            texts[name] = f"{name}: {problem['msg']}"
        else:
            texts.setdefault(name, f"{name}: {problem['msg']}")
    shown = list(texts.items())[:_MAX_PROBLEMS]
    more = "" if len(shown) == len(texts) else f"; and {len(texts) - len(shown)} more"
    return HttpRefusal(400, "; ".join(text for _, text in shown) + more, param=shown[0][0][:_MAX_PARAM])


def _here(location: Sequence[str | int], known: Collection[str] | None) -> str:
    """What a field at the top of a body is here, where others have it."""
    here = answer(str(location[-1]), Place.REQUEST, known) if len(location) == 2 else None
    return "" if here is None else f"; {here}"


def _place(location: Sequence[str | int]) -> str:
    """Such as `messages[0].role`. A union names its members within the location, which mean nothing to a client."""
    place, previous = "", None
    for part in location[1:]:  # the first says body or query
        if isinstance(part, int):
            place += f"[{part}]"
        elif part not in (*_MEMBERS, previous) and not any(character in part for character in "[("):
            place += f".{part}" if place else part
        previous = part
    return place


def error_event(error: Exception) -> str:
    """The error as an event, for a stream that has begun."""
    return f"data: {describe(error)[1].model_dump_json()}\n\n"


def plain_error(code: int, message: str) -> bytes:
    """The body alone, for a refusal before there is a request."""
    return json.dumps(_body(code, message, None, None).model_dump()).encode()


def _body(code: int, message: str, param: str | None, kind: str | None) -> ErrorResponse:
    name = _TYPES.get(code, "invalid_request_error" if code < 500 else "server_error")
    # A lone surrogate cannot be sent, and a client may have put one into a name.
    text = message.encode(errors="replace").decode()
    clean = None if param is None else param.encode(errors="replace").decode()
    return ErrorResponse(error=ErrorDetail(message=text, type=name, param=clean, code=kind or code))
