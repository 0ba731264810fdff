"""`jaxserve route`, from start to exit code: a gRPC door without a model, in front of servers that have one.

It is healthy while a replica is. Nothing here loads JAX, so a router starts in a second and runs beside anything.
"""

import asyncio
import logging
from collections.abc import Callable

from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError
from jaxserve.routing import RouterOptions, create_router
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.descriptors import current_limit, raise_descriptor_limit, room_for_grpc
from jaxserve.serve.grpc_server import GrpcServer
from jaxserve.serve.ports import HeldPort
from jaxserve.serve.route_pool import Pool, Resolve
from jaxserve.serve.route_service import MoveLimits, RouteService
from jaxserve.serve.shutdown import Shutdown, run_with_signals

logger = logging.getLogger(__name__)

_FAREWELL_S = 5.0  # for last messages to leave
_LINGER_S = 0.2  # for statuses to leave, and health watches to be read


def route_forever(config: Config) -> int:
    """Routes until SIGTERM or SIGINT. Must be called on the main thread. Returns the exit code.

    The first signal drains: no new requests, `serve.drain_s` seconds for the running ones, which then end with
    UNAVAILABLE. A second signal ends them at once. Raises ConfigError.
    """
    raise_descriptor_limit()
    return run_with_signals(lambda shutdown: route(config, shutdown))


async def route(
    config: Config,
    shutdown: Shutdown,
    on_ready: Callable[[str], None] = lambda address: None,
    *,
    resolve: Resolve | None = None,
) -> int:
    """`route_forever` without signals; `on_ready` gets the bound `host:port`; for `resolve` see `Pool`."""
    if config.serve.http.port is not None:
        raise ConfigError("serve.http.port is set, but a router forwards gRPC alone; use serve.grpc.port")
    if config.serve.grpc.port is None:
        raise ConfigError("there is nothing to route: set serve.grpc.port (0 takes a free port)")
    options = RouterOptions(slack=config.route.slack, table_blocks=config.route.table_blocks, seed=config.route.seed)
    pool = Pool(config.route, create_router(config.route.policy, options), resolve=resolve)
    service = RouteService(pool, MoveLimits(config.route.retries, config.route.wait_s))
    port = HeldPort(config.serve.host, config.serve.grpc.port, "--port")
    serving, room = config.serve, room_for_grpc(0, current_limit())
    server = GrpcServer(service, DoorCounts(), host=serving.host, config=serving.grpc, max_connections=room, port=port)
    address = f"{config.serve.host}:{await server.start(healthy=False)}"
    pool.start()
    reporting = asyncio.create_task(_report_health(pool, server))
    logger.info("routing gRPC on %s by %s", address, config.route.policy)
    print(f"routing gRPC on {address}", flush=True)
    on_ready(address)
    try:
        await shutdown.drain.wait()
        service.refuse_new()
        await server.report_not_serving()
        await _drain(server, service, config.serve.drain_s, shutdown)
        service.end_all()
        await shutdown.wait_for(server.wait_idle(_FAREWELL_S), _FAREWELL_S)
    finally:
        reporting.cancel()
        await server.stop(_LINGER_S)
        await pool.close()
    return 0


async def _report_health(pool: Pool, server: GrpcServer) -> None:
    while True:
        await pool.changed.wait()
        pool.changed.clear()
        await server.report(pool.healthy)


async def _drain(server: GrpcServer, service: RouteService, drain_s: float, shutdown: Shutdown) -> None:
    logger.info("draining %d requests, at most %.1f s", service.num_live, drain_s)
    waits = [asyncio.ensure_future(server.wait_idle(drain_s)), asyncio.ensure_future(shutdown.now.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    if service.num_live:
        logger.warning("%d requests are cut off", service.num_live)
