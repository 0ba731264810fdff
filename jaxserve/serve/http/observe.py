"""Routes for observers: metrics, the web page and its live view, profiles.

The figures are those of `engine.stats`. Keys are checked by the application, which lets `/` and `/static/` through
without one, since they are the same for every client and hold nothing secret; the page asks for the key that its calls
then need.
"""

from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from jaxserve.config.schema import HttpConfig
from jaxserve.engine import AnyEngine
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.http.bodies import JsonRoute
from jaxserve.serve.http.errors import ErrorResponse, HttpRefusal, error_response
from jaxserve.serve.http.keys import DEBUG_PROFILE
from jaxserve.serve.http.live import MAX_VIEWERS, LiveFeed
from jaxserve.serve.http.profile import MAX_SECONDS, ProfileCapture
from jaxserve.serve.metrics import exposition, make_registry

_MEDIA_TYPES = {
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".html": "text/html",
    ".txt": "text/plain",  # the licence of a library
}
_PAGE_HEADERS: Mapping[str, str] = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class ProfileReply(pydantic.BaseModel):
    """`directory` is on the server; `files` are the paths in it."""

    directory: str
    seconds: float
    files: list[str]


def router(engine: AnyEngine, counts: DoorCounts, config: HttpConfig) -> APIRouter:
    """/metrics and, with `config.web_page`, /, /static/NAME and /events."""
    routes = APIRouter()
    _add_metrics(routes, make_registry(engine, counts, vllm_names=config.vllm_metrics))
    if config.web_page:
        _add_page(routes)
        _add_events(routes, LiveFeed(engine))
    return routes


def _add_metrics(routes: APIRouter, registry: CollectorRegistry) -> None:
    # No coroutine, so that a scrape is read on a thread and delays no stream.
    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def metrics(request: Request) -> Response:
        """The engine's figures, for Prometheus."""
        shown = exposition(registry, request.headers.get("accept", ""))
        return Response(shown.content, headers={"content-type": shown.content_type})


def profile_router(profiles: ProfileCapture) -> APIRouter:
    """POST /debug/profile, for operators."""
    routes = APIRouter(route_class=JsonRoute)
    refusals: dict[int | str, dict[str, Any]] = {code: {"model": ErrorResponse} for code in (400, 404, 409, 500)}

    @routes.post(DEBUG_PROFILE, responses=refusals)
    async def profile(
        seconds: Annotated[float, Query(gt=0, le=MAX_SECONDS, description="How long to record.")] = 3.0,
    ) -> ProfileReply:
        """Captures a JAX profile. Off unless serve.http.profile_dir names a directory."""
        target = await profiles.capture(seconds)
        files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
        return ProfileReply(directory=str(target), seconds=seconds, files=files)

    return routes


def _add_page(routes: APIRouter) -> None:
    """The files are read once, so no path of a client ever reaches the file system."""
    folder = resources.files("jaxserve.serve.http").joinpath("web")
    files = {entry.name: entry.read_bytes() for entry in folder.iterdir()}

    def answer(name: str) -> Response:
        media_type = _MEDIA_TYPES[name[name.rindex(".") :]]
        return Response(files[name], media_type=media_type, headers=_PAGE_HEADERS)

    # HEAD: what some balancers and checks of links send.
    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return answer("index.html")

    @routes.api_route("/static/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in files:
            raise HttpRefusal(404, f"there is no file {name!r:.80}; there are {', '.join(sorted(files))}")
        return answer(name)


def _add_events(routes: APIRouter, feed: LiveFeed) -> None:
    @routes.get("/events", include_in_schema=False)
    async def events() -> Response:
        return _View(feed)


class _View(StreamingResponse):
    """One live view, counted from the look at the bound until its end: many may be asked for in the same moment."""

    def __init__(self, feed: LiveFeed) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the second: or nginx would hold it back
        super().__init__(feed.events(), media_type="text/event-stream", headers=headers)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._feed.num_viewers >= MAX_VIEWERS:
            text = f"{MAX_VIEWERS} live views are open, which is as many as are served; close one"
            await error_response(HttpRefusal(429, text))(scope, receive, send)
            return
        self._feed.num_viewers += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.num_viewers -= 1
