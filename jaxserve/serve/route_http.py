"""The HTTP port of a router: probes, metrics, what its operators may do, and with a tokenizer the APIs of a server.

These are the routes of `serve.http` themselves, over a `RouteEngine`.
"""

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector

from jaxserve.config.schema import Config
from jaxserve.engine import AsyncEngine
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.descriptors import current_limit, room_for_connections
from jaxserve.serve.http.app import answering_routers, join_routers, make_door
from jaxserve.serve.http.probes import plain_probes_router
from jaxserve.serve.http.quarantine import quarantine_router
from jaxserve.serve.http.server import HttpServer
from jaxserve.serve.key_files import KeyFiles
from jaxserve.serve.limits import call_limits
from jaxserve.serve.metrics import exposition
from jaxserve.serve.ports import HeldPort
from jaxserve.serve.quarantine import Quarantine
from jaxserve.serve.route_engine import RouteEngine
from jaxserve.serve.route_metrics import RouteCollector
from jaxserve.serve.route_pool import Pool
from jaxserve.serve.route_service import RouteService
from jaxserve.serve.tls import Certificates
from jaxserve.text import Tokenizer

_CONNECTIONS = 64  # of a port for probes alone, unless the config says how many: those of gRPC need the rest
_POLL_S = 0.01


class RouteHttp:
    """The port. Used on one event loop, that of pool and service."""

    def __init__(
        self,
        pool: Pool,
        service: RouteService,
        quarantine: Quarantine,
        config: Config,
        counts: DoorCounts,
        keys: KeyFiles,
        tokenizer: Tokenizer | None,
    ) -> None:
        """`keys`: who may call; without tokens of operators there are no routes for them. `tokenizer`: that of the
        servers; None: requests come over gRPC alone.

        Raises ConfigError for certificates or limits that cannot be used."""
        serving, http = config.serve, config.serve.http
        assert http.port is not None, "no port, nothing to serve"
        self._engine: RouteEngine | None = None
        self._async_engine: AsyncEngine[RouteEngine] | None = None
        routers: list[APIRouter] = []
        if tokenizer is not None:
            self._engine = RouteEngine(service, tokenizer, config.sched.max_waiting)
            self._async_engine = AsyncEngine(
                self._engine,
                serving.encode_threads,
                limits=call_limits(serving),
            )
            routers += answering_routers(make_door(self._async_engine, http, counts, any_model=True))
        routers += [self._probes(pool, service, counts), _metrics(RouteCollector(pool, service, quarantine, counts))]
        if keys.admins is not None:
            routers.append(quarantine_router(quarantine))
        app = join_routers("jaxserve route", routers, serving, counts, keys)
        self._guard = app.guard
        most = http.max_connections or (_CONNECTIONS if tokenizer is None else None)
        self.max_connections = room_for_connections(most, current_limit())
        certificates = Certificates.of(http, "serve.http")
        self._server = HttpServer(
            app.asgi,
            host=serving.host,
            port=HeldPort(serving.host, http.port, "serve.http.port"),
            header_timeout_s=http.header_timeout_s,
            max_connections=self.max_connections,
            counts=counts,
            tls=None if certificates is None else certificates.context(),
        )

    def _probes(self, pool: Pool, service: RouteService, counts: DoorCounts) -> APIRouter:
        def why_not_ready() -> str | None:
            if not service.accepting:
                return "the router is shutting down"
            if not pool.healthy:
                return f"no replica is well: {pool.describe(())}"
            return None if self._engine is None else self._engine.fault

        return plain_probes_router(lambda: None, why_not_ready, lambda: counts.degraded)

    async def start(self) -> int:
        """Listens; returns the port. Raises ConfigError."""
        port = await self._server.start()
        if self._engine is not None:
            self._engine.start()
        return port

    async def wait_idle(self, timeout_s: float) -> None:
        """Waits until every POST has been answered, or for so many seconds."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._guard.num_live and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)

    async def stop(self, grace_s: float) -> None:
        """Closes the port and, after `grace_s`, the connections that are still open."""
        await self._server.stop(grace_s)
        if self._async_engine is not None:
            self._async_engine.close()
        if self._engine is not None:
            await self._engine.stop()


def _metrics(collector: RouteCollector) -> APIRouter:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    router = APIRouter()

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def read_metrics(request: Request) -> Response:
        """The router's figures, for Prometheus."""
        shown = exposition(registry, request.headers.get("accept", ""))
        return Response(shown.content, headers={"content-type": shown.content_type})

    return router
