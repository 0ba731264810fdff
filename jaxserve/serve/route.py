"""`jaxserve route`, from start to exit code: doors without a model, in front of servers that have one.

It is healthy while a replica is. Nothing here loads JAX, so a router starts in a second and runs beside anything.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from jaxserve.config.addresses import address_of
from jaxserve.config.model_path import resolve_model_path
from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError
from jaxserve.routing import RouterOptions, create_router
from jaxserve.serve.announce import Announce, announce
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.degraded import DegradedReport, missing
from jaxserve.serve.descriptors import current_limit, raise_descriptor_limit, room_for_grpc
from jaxserve.serve.grpc_admin import RouterAdminService
from jaxserve.serve.grpc_server import GrpcServer
from jaxserve.serve.key_files import KeyFiles, has_key_files
from jaxserve.serve.loop_watch import LoopWatch
from jaxserve.serve.open_doors import refuse_half_closed, warn_of_open
from jaxserve.serve.ports import HeldPort
from jaxserve.serve.quarantine import Quarantine
from jaxserve.serve.refusals import RefusalLog
from jaxserve.serve.route_apart import Apart
from jaxserve.serve.route_http import RouteHttp
from jaxserve.serve.route_pool import Pool, Resolve
from jaxserve.serve.route_service import MoveLimits, RouteService
from jaxserve.serve.shutdown import Shutdown, run_with_signals
from jaxserve.text import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_LOOK_S = 0.1  # between looks whether replicas are missing
_FAREWELL_S = 5.0  # for last messages to leave
_LINGER_S = 0.2  # for statuses to leave, and health watches to be read


class Routing(NamedTuple):
    """`host:port` of each port; `http` None: there is none."""

    grpc: str
    http: str | None


def route_forever(config: Config, say: Announce = announce) -> int:
    """Routes until a signal (`shutdown`). Must be called on the main thread. Returns the exit code.

    The first signal drains: no new requests, `serve.drain_s` seconds for the running ones, which then end with
    UNAVAILABLE. A second signal ends them at once. `say` tells of each open port. Raises ConfigError, and
    CheckpointError for the tokenizer.
    """
    raise_descriptor_limit()
    return run_with_signals(lambda shutdown: route(config, shutdown, say=say), rereads=has_key_files(config.serve))


async def route(
    config: Config,
    shutdown: Shutdown,
    on_ready: Callable[[Routing], None] = lambda routing: None,
    *,
    resolve: Resolve | None = None,
    say: Announce = announce,
) -> int:
    """`route_forever` without signals; `on_ready` gets the addresses; for `resolve` see `Pool`."""
    if config.serve.grpc.port is None:
        raise ConfigError("there is nothing to route: set serve.grpc.port (0 takes a free port)")
    refuse_half_closed(config.serve)
    tokenizer = _read_tokenizer(config)
    options = RouterOptions(slack=config.route.slack, table_blocks=config.route.table_blocks, seed=config.route.seed)
    pool = Pool(config.route, create_router(config.route.policy, options), resolve=resolve)
    quarantine = Quarantine(config.route.quarantine_s)
    limits = MoveLimits(config.route.retries, config.route.wait_s)
    keys = KeyFiles(config.serve)
    service = RouteService(pool, limits, Apart.of(config.route), quarantine, keys.grpc)
    port = HeldPort(config.serve.host, config.serve.grpc.port, "--port")
    serving, counts = config.serve, DoorCounts()
    refusals = RefusalLog.begin(counts) if config.runtime.log_requests else None
    http = None
    if serving.http.port is not None:
        http = RouteHttp(pool, service, quarantine, config, counts, keys, tokenizer)
    room = room_for_grpc(0 if http is None else http.max_connections, current_limit())
    server = GrpcServer(
        service,
        counts,
        host=serving.host,
        config=serving.grpc,
        keys=keys,
        max_connections=room,
        port=port,
        admin=None if keys.admins is None else RouterAdminService(quarantine),
    )
    http_address = None if http is None else address_of(serving.host, await http.start())
    address = address_of(serving.host, await server.start(healthy=False))
    warn_of_open(serving)
    pool.start()
    watch = LoopWatch(counts.note_slow)
    watch.start()
    report = DegradedReport([lambda: missing(pool.faults, pool.num_listed, serving.degraded_below)])
    tasks = [asyncio.create_task(_report_health(pool, server)), asyncio.create_task(_report_faults(report, counts))]
    tasks.append(asyncio.create_task(keys.follow(shutdown)))
    say("routing gRPC", address, "")
    if http_address is not None:
        say("metrics and probes over HTTP" if tokenizer is None else "routing HTTP", http_address, "")
    on_ready(Routing(address, http_address))
    try:
        await shutdown.drain.wait()
        service.refuse_new()
        await server.report_not_serving()
        await _drain(server, http, service, config.serve.drain_s, shutdown)
        service.end_all()
        await shutdown.wait_for(_wait_idle(server, http, _FAREWELL_S), _FAREWELL_S)
    finally:
        for task in tasks:
            task.cancel()
        await server.stop(_LINGER_S)
        if http is not None:
            await http.stop(_LINGER_S)
        await pool.close()
        watch.stop()
        if refusals is not None:
            refusals.end()
    return 0


def _read_tokenizer(config: Config) -> Tokenizer | None:
    """None: requests come over gRPC alone. Raises ConfigError or CheckpointError."""
    if config.route.tokenizer is None:
        return None
    if config.serve.http.port is None:
        raise ConfigError("route.tokenizer is for requests over HTTP; set serve.http.port as well, or leave it out")
    return load_tokenizer(resolve_model_path(config.route.tokenizer))


async def _report_health(pool: Pool, server: GrpcServer) -> None:
    while True:
        await pool.changed.wait()
        pool.changed.clear()
        await server.report(pool.healthy)


async def _report_faults(report: DegradedReport, counts: DoorCounts) -> None:
    while True:
        counts.degraded = report.look(asyncio.get_running_loop().time())
        await asyncio.sleep(_LOOK_S)


async def _wait_idle(server: GrpcServer, http: RouteHttp | None, timeout_s: float) -> None:
    """Waits until every call of both doors has ended, or for so many seconds."""
    waits: list[Awaitable[object]] = [server.wait_idle(timeout_s)]
    if http is not None:
        waits.append(http.wait_idle(timeout_s))
    await asyncio.gather(*waits)


async def _drain(
    server: GrpcServer, http: RouteHttp | None, service: RouteService, drain_s: float, shutdown: Shutdown
) -> None:
    logger.info("draining %d requests, at most %.1f s", service.num_live, drain_s)
    waits = [asyncio.ensure_future(_wait_idle(server, http, drain_s)), asyncio.ensure_future(shutdown.now.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    if service.num_live:
        logger.warning("%d requests are cut off", service.num_live)
