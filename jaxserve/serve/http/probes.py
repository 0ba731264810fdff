"""Probes of balancers and operators: health, readiness, load, version.

Each answer is read from the engine at the moment of the request, so that a probe cannot be green beside a dead engine.
`/live` is about the process, `/ready` about new requests: during a drain the process is alive and not ready. `/health`
answers as `/ready`, for clients that know only this name.
"""

from fastapi import APIRouter, Response

from jaxserve import __version__
from jaxserve.engine import AnyEngine
from jaxserve.serve.http.door import Door
from jaxserve.serve.http.errors import ErrorResponse, json_response
from jaxserve.serve.http.responses import LoadResponse, ProbeResponse, VersionResponse

_RED = {503: {"model": ProbeResponse, "description": "No."}}
_REFUSED = {"4XX": {"model": ErrorResponse, "description": "Refused; the message says why."}}


def probes_router(door: Door, stall_s: float) -> APIRouter:
    router = APIRouter(tags=["Operation"], responses=_REFUSED)  # pyright: ignore[reportArgumentType]
    engine = door.engine.engine

    @router.get("/health", response_model=ProbeResponse, responses=_RED)  # pyright: ignore[reportArgumentType]
    async def health() -> Response:
        """Whether requests are answered."""
        return _probe(why_not_live(engine, stall_s) or _why_not_ready(engine))

    @router.get("/ready", response_model=ProbeResponse, responses=_RED)  # pyright: ignore[reportArgumentType]
    async def ready() -> Response:
        """Whether new requests should come here."""
        return _probe(why_not_live(engine, stall_s) or _why_not_ready(engine))

    @router.get("/live", response_model=ProbeResponse, responses=_RED)  # pyright: ignore[reportArgumentType]
    async def live() -> Response:
        """Whether this process is worth keeping."""
        return _probe(why_not_live(engine, stall_s))

    for path, answer in (("/health", health), ("/ready", ready), ("/live", live)):  # HEAD: what some balancers send
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    @router.get("/version")
    async def version() -> VersionResponse:
        """The version of jaxserve."""
        return VersionResponse(version=__version__)

    @router.get("/load")
    async def load() -> LoadResponse:
        """Requests in the engine."""
        return LoadResponse(server_load=engine.num_live, accepting=engine.accepting, **engine.load._asdict())

    return router


def why_not_live(engine: AnyEngine, stall_s: float) -> str | None:
    """The reason why the process is not live; None while the loop of the engine turns."""
    if engine.failure is not None:
        return "the engine has died"
    if engine.stalled_s >= stall_s:
        return f"a step has not ended for {engine.stalled_s:.0f} s"
    return None


def _why_not_ready(engine: AnyEngine) -> str | None:
    return None if engine.accepting else "the engine takes no more requests: it is shutting down"


def _probe(reason: str | None) -> Response:
    if reason is None:
        return json_response(ProbeResponse(status="ok"))
    return json_response(ProbeResponse(status="unavailable", reason=reason), 503)
