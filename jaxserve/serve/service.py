"""The life of a server: all front doors of one engine, from the start through the drain to the exit code.

The order of an end is always the same: first health says NOT_SERVING, so that balancers look elsewhere; then running
requests get their time; then the engine ends the others, each with a last message to its client; the port closes last.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from jaxserve.config.schema import ServeConfig
from jaxserve.engine import AnyEngine, AsyncEngine, CacheControl
from jaxserve.errors import ConfigError, EngineStopped
from jaxserve.serve.counts import DoorCounts
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
from jaxserve.serve.http import HttpDoor
from jaxserve.serve.keys import KnownKeys, read_keys
from jaxserve.serve.ports import HeldPorts
from jaxserve.serve.shutdown import Shutdown, run_with_signals
from jaxserve.serve.tls import read_tls

logger = logging.getLogger(__name__)

_WATCH_S = 0.1  # between two checks for a dead engine; the loop thread cannot call when it is dead
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


def serve_forever(engine: AnyEngine, serve_config: ServeConfig, ports: HeldPorts = HeldPorts()) -> int:  # noqa: B008
    """Starts the engine and the servers; returns after SIGTERM or SIGINT, or when the engine has died.

    `ports` that are held already are listened on; the others are bound now.

    The first signal drains: no new requests, `serve_config.drain_s` seconds for the running ones, which then end with
    finish reason ABORT. A second signal ends them at once. Must be called on the main thread. Returns the exit code:
    0 after a signal, 1 when the engine died. Raises ConfigError when nothing can be served.
    """
    check_serve_config(serve_config)
    raise_descriptor_limit()
    return run_with_signals(lambda shutdown: serve(engine, serve_config, shutdown, ports=ports))


def check_serve_config(serve_config: ServeConfig) -> None:
    """Raises ConfigError when no door is asked for, or when a door's files cannot be used.

    Doors read the files themselves; here the error comes before minutes are spent on loading.
    """
    grpc, http = serve_config.grpc, serve_config.http
    if grpc.port is None and http.port is None:
        raise ConfigError("there is nothing to serve: set serve.grpc.port or serve.http.port (0 takes a free port)")
    _read_admins(serve_config)
    if grpc.port is not None:
        read_tls(grpc, "serve.grpc")
        if grpc.tokens_file is not None:
            read_keys(grpc.tokens_file, "serve.grpc.tokens_file")
    if http.port is not None:
        room_for_connections(http.max_connections, reachable_limit())
        read_tls(http, "serve.http")
        if http.api_keys_file is not None:
            read_keys(http.api_keys_file, "serve.http.api_keys_file")


async def serve(
    engine: AnyEngine,
    serve_config: ServeConfig,
    shutdown: Shutdown,
    on_ready: Callable[[Addresses], None] = lambda addresses: None,
    *,
    ports: HeldPorts = HeldPorts(),  # noqa: B008 (immutable)
) -> int:
    """`serve_forever` without signals; `on_ready` gets the addresses once all doors are open."""
    check_serve_config(serve_config)
    async_engine = AsyncEngine(
        engine, serve_config.encode_threads, max_prompts=serve_config.max_prompts, max_n=serve_config.max_n
    )
    doors = _make_doors(async_engine, serve_config, ports)
    try:
        addresses: dict[str, str] = {}
        for door in doors:
            addresses[door.protocol] = f"{serve_config.host}:{await door.start()}"
        engine.start()
        for protocol, address in addresses.items():
            logger.info("serving %s over %s on %s", engine.model.name, protocol, address)
            print(f"serving {protocol} on {address}", flush=True)
        on_ready(Addresses(addresses.get(GrpcServer.protocol), addresses.get(HttpDoor.protocol)))
        watching = asyncio.create_task(_watch(async_engine, doors, serve_config.stall_s))
        try:
            await _until_shutdown_or_death(watching, shutdown)
            await _end(engine, doors, serve_config, shutdown)
        finally:
            watching.cancel()
    finally:
        await asyncio.gather(*(door.stop(_LINGER_S) for door in doors))
        async_engine.close()
    return 0 if engine.failure is None else 1


def _make_doors(async_engine: AsyncEngine, serve_config: ServeConfig, ports: HeldPorts) -> list[FrontServer]:
    """All doors in the config, not listening yet. Raises ConfigError."""
    doors: list[FrontServer] = []
    counts = DoorCounts()
    admins = _read_admins(serve_config)
    control = None if admins is None else CacheControl(async_engine.engine)
    grpc, http, limit = serve_config.grpc, serve_config.http, current_limit()
    num_http = 0 if http.port is None else room_for_connections(http.max_connections, limit)
    if grpc.port is not None:
        service = InferenceService(async_engine, refuse_special_text=grpc.refuse_special_text)
        room = room_for_grpc(num_http, limit)
        doors.append(
            GrpcServer(
                service,
                counts,
                host=serve_config.host,
                config=grpc,
                max_connections=room,
                port=ports.grpc,
                admin=None if control is None else AdminService(control),
                admins=admins,
            )
        )
    if http.port is not None:
        doors.append(HttpDoor(async_engine, serve_config, counts, ports.http, control=control, admins=admins))
    return doors


def _read_admins(serve_config: ServeConfig) -> KnownKeys | None:
    """None: there is nothing for operators. Raises ConfigError."""
    path = serve_config.admin_tokens_file
    return None if path is None else KnownKeys(read_keys(path, "serve.admin_tokens_file"))


async def _watch(async_engine: AsyncEngine, doors: Sequence[FrontServer], stall_s: float) -> None:
    """Tells doors and clients of a loop that stands still, in a drain too; returns when the engine has died."""
    engine, was_live = async_engine.engine, True
    while engine.failure is None:
        live = engine.stalled_s < stall_s
        if live != was_live:
            was_live = live
            await _report(doors, live)
        if not live:  # those that have come since the last look, too
            async_engine.end_streams(EngineStopped(f"a step has not ended for {stall_s:g} s; the device may be stuck"))
        await asyncio.sleep(_WATCH_S)
    logger.error("the engine has died, so serving ends: %r", engine.failure)
    for door in doors:
        await door.report_live(False)


async def _until_shutdown_or_death(watching: asyncio.Task[None], shutdown: Shutdown) -> None:
    asked = asyncio.ensure_future(shutdown.drain.wait())
    try:
        await asyncio.wait({watching, asked}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
    if watching.done():
        watching.result()  # a defect here must not leave a service without a watch


async def _end(engine: AnyEngine, doors: Sequence[FrontServer], serve_config: ServeConfig, shutdown: Shutdown) -> None:
    now_s = asyncio.get_running_loop().time
    over_s = now_s()
    for door in doors:
        await door.report_not_serving()
    if engine.failure is None:
        over_s += serve_config.drain_s
        await _drain(engine, serve_config, shutdown)
    if not await shutdown.wait_for(_in_thread(engine.stop), _STOP_S):
        logger.error("the engine did not stop in time; its device does not answer")
    # A client that reads slowly has not got its answer when the engine is done with it: the drain is for it as well.
    farewell_s = max(_FAREWELL_S, over_s - now_s())
    await shutdown.wait_for(asyncio.gather(*(door.wait_idle(farewell_s) for door in doors)), farewell_s)


async def _report(doors: Sequence[FrontServer], live: bool) -> None:
    """A loop that stands still answers nothing: it is neither alive nor ready until it comes round again."""
    if live:
        logger.warning("the engine's loop has come round again")
    else:
        logger.error("the engine's loop stands still: health turns red and running requests end with an error")
    for door in doors:
        await door.report_live(live)
        await door.report(live)


async def _drain(engine: AnyEngine, serve_config: ServeConfig, shutdown: Shutdown) -> None:
    """Waits until nothing runs, the time is over, a second signal comes, or a stall has ended every stream."""
    logger.info("draining %d requests, at most %.1f s", engine.num_live, serve_config.drain_s)
    drained = _in_thread(lambda: engine.drain(serve_config.drain_s))
    hurried = asyncio.ensure_future(shutdown.now.wait())
    ends = {drained, hurried}
    while engine.stalled_s < serve_config.stall_s:
        if (await asyncio.wait(ends, timeout=_WATCH_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            break
    hurried.cancel()
    if engine.num_live:
        logger.warning("%d requests are cut off", engine.num_live)


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
