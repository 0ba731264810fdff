"""The HTTP port of a router: probes, metrics, and what its operators may do. Requests come over gRPC alone."""

from collections.abc import Iterator

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.routing import Route

from jaxserve.config.schema import ServeConfig
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.descriptors import current_limit, room_for_connections
from jaxserve.serve.http.app import surround
from jaxserve.serve.http.probes import plain_probes_router
from jaxserve.serve.http.quarantine import quarantine_router
from jaxserve.serve.http.server import HttpServer
from jaxserve.serve.keys import KnownKeys
from jaxserve.serve.metric_names import PREFIX
from jaxserve.serve.metrics import exposition
from jaxserve.serve.ports import HeldPort
from jaxserve.serve.quarantine import Quarantine
from jaxserve.serve.route_pool import Pool
from jaxserve.serve.route_service import RouteService
from jaxserve.serve.tls import Certificates

_CONNECTIONS = 64  # unless the config says how many: those of gRPC are what a router is for


class RouteObserver:
    """The port. Used on one event loop, that of pool and service."""

    def __init__(
        self,
        pool: Pool,
        service: RouteService,
        quarantine: Quarantine,
        config: ServeConfig,
        counts: DoorCounts,
        admins: KnownKeys | None,
    ) -> None:
        """`admins`: the keys of operators; None: there are no routes for them.

        Raises ConfigError for keys, certificates or limits that cannot be used."""
        http = config.http
        assert http.port is not None, "no port, nothing to observe"
        self.max_connections = room_for_connections(http.max_connections or _CONNECTIONS, current_limit())
        certificates = Certificates.of(http, "serve.http")
        self._server = HttpServer(
            surround(*_make_api(pool, service, quarantine, counts, admins is not None), config, counts, admins).asgi,
            host=config.host,
            port=HeldPort(config.host, http.port, "serve.http.port"),
            header_timeout_s=http.header_timeout_s,
            max_connections=self.max_connections,
            counts=counts,
            tls=None if certificates is None else certificates.context(),
        )

    async def start(self) -> int:
        """Listens; returns the port. Raises ConfigError."""
        return await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Closes the port and, after `grace_s`, the connections that are still open."""
        await self._server.stop(grace_s)


class RouteCollector(Collector):
    """Reads the figures of a router at each scrape. On its event loop."""

    def __init__(self, pool: Pool, service: RouteService, quarantine: Quarantine, counts: DoorCounts) -> None:
        self._pool = pool
        self._service = service
        self._quarantine = quarantine
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of the documentation."""
        well = GaugeMetricFamily(PREFIX + "router_replica_well", "1 while it gets requests.", labels=("replica",))
        running = GaugeMetricFamily(
            PREFIX + "router_replica_requests_running", "Requests of this router there.", labels=("replica",)
        )
        sent = CounterMetricFamily(
            PREFIX + "router_replica_requests", "Requests that were sent to it.", labels=("replica",)
        )
        for state in self._pool.states:
            well.add_metric([state.address], float(state.healthy))
            running.add_metric([state.address], state.num_running)
            sent.add_metric([state.address], state.num_requests)
        yield from (well, running, sent)
        yield GaugeMetricFamily(PREFIX + "router_requests_running", "Calls that run.", value=self._service.num_live)
        yield GaugeMetricFamily(
            PREFIX + "router_accepting", "1 while new requests are taken.", value=float(self._service.accepting)
        )
        yield GaugeMetricFamily(
            PREFIX + "router_degraded",
            "1 while /health says degraded.",
            value=float(self._counts.degraded is not None),
        )
        moves = CounterMetricFamily(
            PREFIX + "router_moves",
            "Requests that went on at another replica, by why: it died, drained, was emptied.",
            labels=("reason",),
        )
        for reason, number in self._service.counts.moves.items():
            moves.add_metric([reason], number)
        yield moves
        yield GaugeMetricFamily(
            PREFIX + "router_quarantined", "Contents that are refused.", value=len(self._quarantine)
        )
        yield CounterMetricFamily(
            PREFIX + "router_convictions",
            "Contents that replicas were found to die of.",
            value=self._quarantine.num_convictions,
        )
        yield CounterMetricFamily(
            PREFIX + "router_quarantine_refusals",
            "Requests that were refused for their content.",
            value=self._quarantine.num_refused,
        )
        calls = CounterMetricFamily(
            PREFIX + "router_grpc_requests", "Calls of its methods that have ended.", labels=("method", "code")
        )
        for values, number in self._counts.grpc.items():
            calls.add_metric(values, number)
        yield calls


def _make_api(
    pool: Pool, service: RouteService, quarantine: Quarantine, counts: DoorCounts, has_admins: bool
) -> tuple[FastAPI, list[Route]]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RouteCollector(pool, service, quarantine, counts))
    ProcessCollector(registry=registry)
    metrics = APIRouter()

    @metrics.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def read_metrics(request: Request) -> Response:
        """The router's figures, for Prometheus."""
        shown = exposition(registry, request.headers.get("accept", ""))
        return Response(shown.content, headers={"content-type": shown.content_type})

    def why_not_ready() -> str | None:
        if not service.accepting:
            return "the router is shutting down"
        return None if pool.healthy else f"no replica is well: {pool.describe(())}"

    api = FastAPI(title="jaxserve route", docs_url=None, redoc_url=None)
    probes = plain_probes_router(lambda: None, why_not_ready, lambda: counts.degraded)
    routers = [probes, metrics, *([quarantine_router(quarantine)] if has_admins else [])]
    for router in routers:
        api.include_router(router)
    return api, [route for one in (api, *routers) for route in one.routes if isinstance(route, Route)]
