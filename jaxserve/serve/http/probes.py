"""Probes of balancers and operators: health, readiness, load, version.

Each answer is read from the engine at the moment of the request, so that a probe cannot be green beside a dead engine.
`/live` is about the process, `/ready` about new requests: during a drain, and while a step does not end, the process is
alive and not ready. A process that answers with less than it should have is ready and says `degraded`. `/health` and
`/ping` (SageMaker's) answer as `/ready`, for clients that know only these names.
"""

from collections.abc import Callable

from fastapi import APIRouter, Response

from jaxserve import __version__
from jaxserve.engine import AnyEngine
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.http.errors import ErrorResponse, json_response
from jaxserve.serve.http.responses import LoadResponse, ProbeResponse, VersionResponse

_RED = {503: {"model": ProbeResponse, "description": "No."}}
_REFUSED = {"4XX": {"model": ErrorResponse, "description": "Refused; the message says why."}}


# Why not; None: yes.
Reason = Callable[[], str | None]


def probes_router(engine: AnyEngine, counts: DoorCounts) -> APIRouter:
    router = plain_probes_router(
        lambda: why_not_live(engine), lambda: why_not_live(engine) or _why_not_ready(engine), lambda: counts.degraded
    )

    @router.get("/load")
    async def load() -> LoadResponse:
        """Requests in the engine."""
        return LoadResponse(server_load=engine.num_live, accepting=engine.accepting, **engine.load._asdict())

    return router


def plain_probes_router(live: Reason, ready: Reason, degraded: Reason) -> APIRouter:
    """All of them but `/load`, for a process that need not have an engine. `degraded`: see `serve.degraded`."""
    router = APIRouter(tags=["Operation"], responses=_REFUSED)  # pyright: ignore[reportArgumentType]

    async def is_ready() -> Response:
        """Whether requests are answered."""
        return _probe(ready(), degraded())

    async def is_live() -> Response:
        """Whether this process is worth keeping."""
        return _probe(live(), None)

    for path, answer in (("/health", is_ready), ("/ready", is_ready), ("/ping", is_ready), ("/live", is_live)):
        # HEAD: what some balancers send; SageMaker sends both others.
        for method in ("GET", "HEAD", *(["POST"] if path == "/ping" else [])):
            router.add_api_route(
                path,
                answer,
                methods=[method],
                response_model=ProbeResponse,
                responses=_RED,  # pyright: ignore[reportArgumentType]
                include_in_schema=method != "HEAD",
                operation_id=f"{method.lower()}_{path[1:]}",
            )

    @router.get("/version")
    async def version() -> VersionResponse:
        """The version of jaxserve."""
        return VersionResponse(version=__version__)

    return router


def why_not_live(engine: AnyEngine) -> str | None:
    """The reason why the process is not live; None while a replica lives or may come back."""
    return None if engine.failure is None else "the engine has died"


def _why_not_ready(engine: AnyEngine) -> str | None:
    if engine.ready:
        return None
    if engine.accepting:
        return f"a step has not ended for {engine.stalled_s:.0f} s, longer than its deadline"
    if any(replica.asleep for replica in engine.replicas):
        return "the engine sleeps; POST /wake_up wakes it"
    return "the engine takes no more requests: it is shutting down, or its replicas are being built again"


def _probe(reason: str | None, degraded: str | None) -> Response:
    if reason is None:
        return json_response(
            ProbeResponse(status="ok") if degraded is None else ProbeResponse(status="degraded", reason=degraded)
        )
    return json_response(ProbeResponse(status="unavailable", reason=reason), 503)
