"""From start to exit code: all front doors of one engine, and how they end.

Owns draining and the exit code. Refuses protocols. The order of an end is always the same: first health says
NOT_SERVING, so that balancers look elsewhere; then running requests get their time; then the engine ends what is left
and each client is told; the port closes last.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from jaxserve.config_schema import ServeConfig
from jaxserve.engine import AnyEngine, AsyncEngine
from jaxserve.errors import ConfigError
from jaxserve.serve.grpc_server import GrpcServer
from jaxserve.serve.grpc_service import InferenceService
from jaxserve.serve.shutdown import Shutdown, run_with_signals

logger = logging.getLogger(__name__)

_WATCH_S = 0.1  # how often a dead engine is looked for; the loop thread cannot call us when it is dead
_STOP_S = 10.0  # a step on a device that answers is shorter than this; one that does not must not keep us
_FAREWELL_S = 5.0  # for last messages to leave
_LINGER_S = 0.2  # for statuses to leave, and health watches to be read


def serve_forever(engine: AnyEngine, serve_config: ServeConfig) -> int:
    """Starts the engine and the servers; returns after SIGTERM or SIGINT, or when the engine has died.

    The first signal drains: no new requests, `serve_config.drain_s` seconds for the running ones, which then end with
    finish reason ABORT. A second signal ends them at once. Must be called on the main thread. Returns the exit code:
    0 after a signal, 1 when the engine died. Raises ConfigError when nothing can be served.
    """
    check_serve_config(serve_config)
    return run_with_signals(lambda shutdown: serve(engine, serve_config, shutdown))


def check_serve_config(serve_config: ServeConfig) -> None:
    """Raises ConfigError for a door that does not exist, or when no door is asked for."""
    if serve_config.http.port is not None:
        raise ConfigError("serve.http.port is set, but this version has no HTTP API yet; use serve.grpc.port")
    if serve_config.grpc.port is None:
        raise ConfigError("there is nothing to serve: set serve.grpc.port (0 takes a free port)")


async def serve(
    engine: AnyEngine,
    serve_config: ServeConfig,
    shutdown: Shutdown,
    on_ready: Callable[[str], None] = lambda address: None,
) -> int:
    """`serve_forever` without signals; `on_ready` gets the bound `host:port`."""
    check_serve_config(serve_config)
    assert serve_config.grpc.port is not None
    async_engine = AsyncEngine(engine)
    server = GrpcServer(InferenceService(async_engine), host=serve_config.host, port=serve_config.grpc.port)
    address = f"{serve_config.host}:{await server.start()}"
    engine.start()
    logger.info("serving %s over gRPC on %s", engine.model.name, address)
    print(f"serving gRPC on {address}", flush=True)
    on_ready(address)
    try:
        await _until_shutdown_or_death(engine, server, serve_config.stall_s, shutdown)
        await server.report_not_serving()
        if engine.failure is None:
            await _drain(engine, serve_config.drain_s, shutdown)
        await _stop_engine(engine)
        await server.wait_idle(_FAREWELL_S)
    finally:
        await server.stop(_LINGER_S)
        async_engine.close()
    return 0 if engine.failure is None else 1


async def _until_shutdown_or_death(engine: AnyEngine, server: GrpcServer, stall_s: float, shutdown: Shutdown) -> None:
    while engine.failure is None and not shutdown.drain.is_set():
        await server.report_live(engine.stalled_s < stall_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(shutdown.drain.wait(), _WATCH_S)
    if engine.failure is not None:
        logger.error("the engine has died, so serving ends: %r", engine.failure)
        await server.report_live(False)


async def _drain(engine: AnyEngine, drain_s: float, shutdown: Shutdown) -> None:
    logger.info("draining %d requests, at most %.1f s", engine.num_live, drain_s)
    drained = _in_thread(lambda: engine.drain(drain_s))
    hurried = asyncio.ensure_future(shutdown.now.wait())
    await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if engine.num_live:
        logger.warning("%d requests are cut off", engine.num_live)


async def _stop_engine(engine: AnyEngine) -> None:
    stopped = _in_thread(engine.stop)
    if not (await asyncio.wait({stopped}, timeout=_STOP_S))[0]:
        logger.error("the engine did not stop within %.0f s; its device does not answer", _STOP_S)


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
        with contextlib.suppress(RuntimeError):  # the event loop has closed: nobody waits any more
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
