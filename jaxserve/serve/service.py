"""The life of a server: all front doors of one engine, from the start through the drain to the exit code.

The order of an end is always the same: first health says NOT_SERVING, so that balancers look elsewhere; then running
requests get their time, and so do other servers to fetch the prompts that were computed for them; then pages go to the
store, and the engine hands the other requests over, each with a last message to its client; the port closes last.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from jaxserve.config.addresses import address_of
from jaxserve.config.schema import ServeConfig
from jaxserve.engine import AnyEngine, AsyncEngine, CacheControl
from jaxserve.engine.refusals import reason_of
from jaxserve.errors import ConfigError, EngineStopped, StepStalled
from jaxserve.sched.ladder import Rung
from jaxserve.serve.adapters import AdapterOrders
from jaxserve.serve.announce import Announce, announce
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.degraded import DegradedReport, handoffs_of, replicas_of, rungs_of
from jaxserve.serve.descriptors import (
    current_limit,
    raise_descriptor_limit,
    reachable_limit,
    room_for_connections,
    room_for_grpc,
)
from jaxserve.serve.grpc_admin import AdminService
from jaxserve.serve.grpc_server import GrpcServer
from jaxserve.serve.grpc_service import InferenceService
from jaxserve.serve.handoff import HandoffSetup
from jaxserve.serve.handoff_service import HandoffService
from jaxserve.serve.key_files import KeyFiles, has_key_files
from jaxserve.serve.limits import call_limits, make_tenants
from jaxserve.serve.loop_watch import LoopWatch
from jaxserve.serve.open_doors import refuse_half_closed, warn_of_open
from jaxserve.serve.orders import Drain, Orders, ShownSettings
from jaxserve.serve.ports import GRPC, HTTP, HeldPorts
from jaxserve.serve.refusals import RefusalLog
from jaxserve.serve.shutdown import Shutdown, run_with_signals
from jaxserve.serve.tls import Certificates
from jaxserve.serve.weights import WEIGHTS_DIR, ChangesWeights, CheckpointRoot, WeightOrders

logger = logging.getLogger(__name__)

DIED = 1
HUNG = 5
_WATCH_S = 0.1  # between two checks for a dead engine; the loop thread cannot call when it is dead
_FETCH_S = 0.02  # between two looks whether all leases have ended
_TURN_S = 1.0  # for the loop to hear that the time for its pages is over
_STOP_S = 10.0  # a step is shorter than this; a device that does not answer must not hold up the end
_FAREWELL_S = 5.0  # for last messages to leave
_LINGER_S = 0.2  # for statuses to leave, and health watches to be read


class Addresses(NamedTuple):
    """`host:port` of each door; None where there is none."""

    grpc: str | None
    http: str | None


class FrontServer(Protocol):
    """One listening port of the engine, and its health. Used on one event loop."""

    protocol: str

    async def start(self) -> int:
        """Listens; returns the port. Raises ConfigError."""
        ...

    async def report(self, healthy: bool) -> None:
        """Reports whether new requests should come."""
        ...

    async def report_live(self, live: bool) -> None:
        """Reports whether the process is worth keeping."""
        ...

    async def report_not_serving(self) -> None:
        """Reports that no new requests should come from now on; the running ones go on."""
        ...

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until every call has ended; True when all have."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Closes the port and, after `grace_s`, the connections that are still open."""
        ...


def serve_forever(
    engine: AnyEngine,
    serve_config: ServeConfig,
    ports: HeldPorts = HeldPorts(),  # noqa: B008 (immutable)
    handoff: HandoffSetup | None = None,
    weights: ChangesWeights | None = None,
    settings: ShownSettings | None = None,
    adapters_dir: str | None = None,
    on_ready: Callable[[Addresses], None] = lambda addresses: None,
    log_refusals: bool = False,
    say: Announce = announce,
) -> int:
    """Starts the engine and the servers; returns after a signal (`shutdown`), or when the engine has died.

    `ports` that are held already are listened on; the others are bound now. `handoff`: the engine exchanges pages with
    others. `weights`: operators may give it other weights. `settings`: the whole config for operators to see; None:
    only `serve_config` is known. `adapters_dir`: `adapters.directory`. `on_ready` gets the addresses once all doors are
    open. `log_refusals`: each refused call has a line in the log. `say` tells of each open port.

    The first signal drains: no new requests, `serve_config.drain_s` seconds for the running ones. Those that
    are left then end with the error Draining, and routers and clients go on with them elsewhere. A second signal ends
    them at once. Must be called on the main thread. Returns the exit code: 0 after a signal, DIED or HUNG when no
    replica is left: HUNG when their devices do not answer, for which the exit of the interpreter would wait. Raises
    ConfigError when nothing can be served.
    """
    check_serve_config(serve_config, adapters_dir)
    raise_descriptor_limit()
    return run_with_signals(
        lambda shutdown: serve(
            engine,
            serve_config,
            shutdown,
            on_ready,
            ports=ports,
            handoff=handoff,
            weights=weights,
            settings=settings,
            adapters_dir=adapters_dir,
            log_refusals=log_refusals,
            say=say,
        ),
        rereads=has_key_files(serve_config),
    )


def check_serve_config(serve_config: ServeConfig, adapters_dir: str | None = None) -> None:
    """Raises ConfigError when no door is asked for, or when a door's files cannot be used.

    Doors read the files themselves; here the error comes before minutes are spent on loading.
    """
    grpc, http = serve_config.grpc, serve_config.http
    if grpc.port is None and http.port is None:
        raise ConfigError("there is nothing to serve: set serve.grpc.port or serve.http.port (0 takes a free port)")
    refuse_half_closed(serve_config)
    KeyFiles(serve_config)
    if adapters_dir is not None and serve_config.admin_tokens_file is None:
        raise ConfigError(
            "adapters.directory is set, but nobody may load an adapter from it; set serve.admin_tokens_file, or leave "
            "it out"
        )
    if http.port is not None and http.profile_dir is not None and serve_config.admin_tokens_file is None:
        raise ConfigError(
            "serve.http.profile_dir is set, but nobody may record a profile; set serve.admin_tokens_file, or leave it "
            "out"
        )
    if grpc.port is not None:
        Certificates.of(grpc, "serve.grpc")
    if http.port is not None:
        room_for_connections(http.max_connections, reachable_limit())
        Certificates.of(http, "serve.http")
        if http.weights_dir is not None:
            CheckpointRoot(http.weights_dir, WEIGHTS_DIR)
            if serve_config.admin_tokens_file is None:
                raise ConfigError(
                    "serve.http.weights_dir is set, but nobody may name a checkpoint in it; set "
                    "serve.admin_tokens_file, or leave it out"
                )


async def serve(
    engine: AnyEngine,
    serve_config: ServeConfig,
    shutdown: Shutdown,
    on_ready: Callable[[Addresses], None] = lambda addresses: None,
    *,
    ports: HeldPorts = HeldPorts(),  # noqa: B008 (immutable)
    handoff: HandoffSetup | None = None,
    weights: ChangesWeights | None = None,
    settings: ShownSettings | None = None,
    adapters_dir: str | None = None,
    log_refusals: bool = False,
    say: Announce = announce,
) -> int:
    """`serve_forever` without signals; `on_ready` gets the addresses once all doors are open."""
    check_serve_config(serve_config, adapters_dir)
    keys = KeyFiles(serve_config)
    async_engine = AsyncEngine(
        engine,
        serve_config.encode_threads,
        limits=call_limits(serve_config),
        tenants=make_tenants(serve_config.tenants),
    )
    exchange = None
    if handoff is not None:
        exchange = HandoffService(
            async_engine,
            handoff,
            refuse_special_text=serve_config.grpc.refuse_special_text,
            owners=keys.grpc,
        )
    orders = None
    if keys.admins is not None:
        orders = Orders(
            CacheControl(engine),
            Drain(engine, shutdown, serve_config.drain_s),
            ShownSettings({"serve": serve_config.model_dump(mode="json")}) if settings is None else settings,
            None if weights is None else WeightOrders(weights, serve_config.http.weights_dir),
            None if engine.model.adapters is None else AdapterOrders(engine, adapters_dir),
        )
    counts = DoorCounts()
    refusals = RefusalLog.begin(counts) if log_refusals else None
    doors = _make_doors(async_engine, serve_config, keys, ports, orders, exchange, counts)
    watch = LoopWatch(counts.note_slow)
    watch.start()
    try:
        addresses: dict[str, str] = {}
        lending = None if exchange is None else exchange.start()  # before a ticket can be asked for
        for door in doors:
            addresses[door.protocol] = address_of(serve_config.host, await door.start())
        warn_of_open(serve_config)
        engine.start()
        for protocol, address in addresses.items():
            say(f"serving {protocol}", address, "")
        if lending is not None:
            say("lending pages", lending, "")
        on_ready(Addresses(addresses.get(GRPC), addresses.get(HTTP)))
        report = _make_report(engine, serve_config, exchange)
        watching = asyncio.create_task(_watch(async_engine, doors, serve_config, shutdown, report, counts))
        following = asyncio.create_task(keys.follow(shutdown))
        try:
            await _until_shutdown_or_death(watching, shutdown)
            await _end(engine, exchange, doors, serve_config, shutdown)
        finally:
            watching.cancel()
            following.cancel()
    finally:
        await asyncio.gather(*(door.stop(_LINGER_S) for door in doors))
        if exchange is not None:
            exchange.stop()
        async_engine.close()
        watch.stop()
        if refusals is not None:
            refusals.end()
    if engine.failure is None:
        return 0
    return HUNG if isinstance(engine.failure, StepStalled) else DIED


def _make_doors(
    async_engine: AsyncEngine[AnyEngine],
    serve_config: ServeConfig,
    keys: KeyFiles,
    ports: HeldPorts,
    orders: Orders | None,
    handoff: HandoffService | None,
    counts: DoorCounts,
) -> list[FrontServer]:
    """All doors in the config, not listening yet. Raises ConfigError."""
    doors: list[FrontServer] = []
    grpc, http, limit = serve_config.grpc, serve_config.http, current_limit()
    num_http = 0 if http.port is None else room_for_connections(http.max_connections, limit)
    if grpc.port is not None:
        service = InferenceService(
            async_engine,
            refuse_special_text=grpc.refuse_special_text,
            receive=None if handoff is None else handoff.receive,
            owners=keys.grpc,
        )
        room = room_for_grpc(num_http, limit)
        doors.append(
            GrpcServer(
                service,
                counts,
                host=serve_config.host,
                config=grpc,
                keys=keys,
                max_connections=room,
                port=ports.grpc,
                admin=None if orders is None else AdminService(orders),
                handoff=handoff,
            )
        )
    if http.port is not None:
        from jaxserve.serve.http import HttpDoor  # FastAPI, and the models of bodies: a fifth of a second

        counts.read_handoff = None if handoff is None else handoff.read_counts
        doors.append(HttpDoor(async_engine, serve_config, counts, keys, ports.http, orders=orders))
    return doors


def _make_report(engine: AnyEngine, serve_config: ServeConfig, handoff: HandoffService | None) -> DegradedReport:
    sources = [replicas_of(engine, serve_config.degraded_below), rungs_of(engine)]
    if handoff is not None:
        sources.append(handoffs_of(lambda: handoff.counts))
    return DegradedReport(sources)


async def _watch(
    async_engine: AsyncEngine[AnyEngine],
    doors: Sequence[FrontServer],
    serve_config: ServeConfig,
    shutdown: Shutdown,
    report: DegradedReport,
    counts: DoorCounts,
) -> None:
    """Tells doors whether steps advance, in a drain too, and probes why the process is degraded.

    Returns when the engine has died.

    Drains once every replica is on the last rung of its ladder.
    """
    engine, was_ready = async_engine.engine, True
    while engine.failure is None:
        if engine.ready != was_ready:
            was_ready = not was_ready
            if was_ready:
                logger.warning("the engine is ready again")
            elif engine.accepting:
                logger.error("no loop of the engine comes round: it is not ready until one does")
            for door in doors:
                await door.report(was_ready)
        if not shutdown.drain.is_set() and all(stats.degraded[0] is Rung.DRAIN for stats in engine.stats):
            logger.error("the pressure does not fall although nothing new is taken, so serving ends (degrade.highest)")
            shutdown.drain_within(serve_config.drain_s)
        counts.degraded = report.look(asyncio.get_running_loop().time())
        await asyncio.sleep(_WATCH_S)
    logger.error("the engine has died, so serving ends: %r", engine.failure)
    for door in doors:
        await door.report_live(False)
    async_engine.end_streams(EngineStopped(f"the engine has died: {reason_of(engine.failure)}"))  # whom no loop told


async def _until_shutdown_or_death(watching: asyncio.Task[None], shutdown: Shutdown) -> None:
    asked = asyncio.ensure_future(shutdown.drain.wait())
    try:
        await asyncio.wait({watching, asked}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
    if watching.done():
        watching.result()  # a defect here must not leave a service without a watch


async def _end(
    engine: AnyEngine,
    exchange: HandoffService | None,
    doors: Sequence[FrontServer],
    serve_config: ServeConfig,
    shutdown: Shutdown,
) -> None:
    now_s = asyncio.get_running_loop().time
    over_s = now_s()
    for door in doors:
        await door.report_not_serving()
    if engine.failure is None:
        over_s = min(over_s + serve_config.drain_s, shutdown.until_s)
        await _drain(engine, serve_config, shutdown)
        if exchange is not None:
            await _until_fetched(engine, exchange, over_s, shutdown)
        if not shutdown.now.is_set():
            export_s = serve_config.export_s
            over_s += export_s
            await shutdown.wait_for(_in_thread(lambda: engine.export(export_s)), export_s + _TURN_S)
    if not await shutdown.wait_for(_in_thread(lambda: engine.stop(hand_over=True)), _STOP_S):
        logger.error("the engine did not stop in time; its device does not answer")
    # A client that reads slowly has not got its answer when the engine is done with it: the drain is for it as well.
    farewell_s = max(_FAREWELL_S, over_s - now_s())
    await shutdown.wait_for(asyncio.gather(*(door.wait_idle(farewell_s) for door in doors)), farewell_s)


async def _drain(engine: AnyEngine, serve_config: ServeConfig, shutdown: Shutdown) -> None:
    """Waits until nothing runs, the time is over, a second signal comes, or the engine has died."""
    logger.info("draining %d requests, at most %.1f s", engine.num_live, serve_config.drain_s)
    drained = _in_thread(lambda: engine.drain(serve_config.drain_s))
    hurried = asyncio.ensure_future(shutdown.now.wait())
    ends = {drained, hurried}
    now_s = asyncio.get_running_loop().time
    while engine.failure is None and (left_s := shutdown.until_s - now_s()) > 0:
        if (await asyncio.wait(ends, timeout=min(_WATCH_S, left_s), return_when=asyncio.FIRST_COMPLETED))[0]:
            break
    hurried.cancel()
    if engine.num_live:
        logger.warning("%d requests are handed over", engine.num_live)


async def _until_fetched(engine: AnyEngine, exchange: HandoffService, until_s: float, shutdown: Shutdown) -> None:
    """Waits until no lease is left, and no prompt that is computed for another server; as `_drain` does, no longer than
    the drain. The loop of the engine goes on meanwhile: fetches need it."""
    now_s = asyncio.get_running_loop().time
    if exchange.num_owed:
        logger.info("the pages of %d prompts wait to be fetched, %.1f s at most", exchange.num_owed, until_s - now_s())
    while (num_owed := exchange.num_owed) and engine.failure is None:
        if now_s() >= min(until_s, shutdown.until_s) or shutdown.now.is_set():
            logger.warning("the pages of %d prompts are not fetched, and will be computed again", num_owed)
            return
        await asyncio.sleep(_FETCH_S)


def _in_thread(work: Callable[[], object]) -> asyncio.Future[None]:
    """Runs `work` on a daemon thread: unlike one of an executor, it cannot keep a process with a hung device alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop has closed: no task waits any more
            loop.call_soon_threadsafe(_settle, done, error)

    threading.Thread(target=run, name="jaxserve-shutdown", daemon=True).start()
    return done


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
