"""`jaxserve kv-server`, from start to exit code: pages of other servers, in memory or in a directory.

It needs no model, no secret and no JAX. Clients are trusted with all pages, so they show a certificate, or are on this
machine. What they send is bounded all the same: names of a message, bytes of a page, calls at once.

It ends after its grace, or at a second signal, even while calls hang in a file system that does not answer.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from jaxserve.config.addresses import address_of
from jaxserve.config.schema import Config, KVServerConfig
from jaxserve.errors import ConfigError
from jaxserve.kv.blobs import Blobs, BlobsError, BlobTooLarge
from jaxserve.kv.file_store import DirectoryBlobs
from jaxserve.kv.gen import pages_pb2 as pb
from jaxserve.kv.gen import pages_pb2_grpc as pb_grpc
from jaxserve.kv.memory_store import MemoryStore
from jaxserve.kv.names import BlobName, is_shown_name
from jaxserve.kv.remote import MAX_NAMES, MESSAGE_OVERHEAD
from jaxserve.serve.announce import Announce, announce
from jaxserve.serve.page_port import PORT_OPTIONS, DecodedMessages, call_threads, mutual_credentials
from jaxserve.serve.ports import HeldPort
from jaxserve.serve.shutdown import Shutdown, run_with_signals

logger = logging.getLogger(__name__)

_GRACE_S = 5.0  # for calls to end
_CANCELLED_S = 1.0  # for gRPC to tell clients that theirs did not
_LOOK_S = 0.02
_TIMEOUT_S = 60.0  # that blobs in memory or a directory have no use for
_NAME = pb.DESCRIPTOR.services_by_name["Pages"].full_name

T = TypeVar("T")


def kv_server_forever(config: Config, say: Announce = announce) -> int:
    """Serves until a signal (`shutdown`), on the main thread; `say` tells of the open port. Returns the exit code.

    Raises ConfigError.
    """
    return run_with_signals(lambda shutdown: kv_server(config.kv_server, shutdown, say=say))


async def kv_server(
    config: KVServerConfig,
    shutdown: Shutdown,
    on_ready: Callable[[str], None] = lambda address: None,
    say: Announce = announce,
) -> int:
    """`kv_server_forever` without signals; `on_ready` gets the bound `host:port`."""
    credentials = mutual_credentials(config, "kv_server", config.host, "clients")
    held = HeldPort(config.host, config.port, "kv_server.port", "kv_server.host")
    try:
        blobs = _blobs(config)
    finally:
        held.close()
    server = _server(config, blobs)
    address = address_of(config.host, held.number)
    try:
        if credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}; another process was faster") from error
    server.start()
    where = "memory" if config.directory is None else config.directory
    say("keeping pages", address, f", at most {config.max_bytes} bytes in {where}")
    on_ready(address)
    await shutdown.drain.wait()
    await _stop(server, shutdown)
    blobs.close()
    return 0


async def _stop(server: grpc.Server, shutdown: Shutdown) -> None:
    """Looks now and then, since a thread that waits for gRPC could not be left behind."""
    loop = asyncio.get_running_loop()
    stopped, end_s = server.stop(_GRACE_S), loop.time() + _GRACE_S + _CANCELLED_S
    while not stopped.is_set() and loop.time() < end_s:
        if shutdown.now.is_set():
            server.stop(0)  # the grace is over
            end_s = min(end_s, loop.time() + _CANCELLED_S)
        await asyncio.sleep(_LOOK_S)


class PagesService(pb_grpc.PagesServicer):
    """The methods of the protocol over `Blobs`. Called by several threads."""

    def __init__(self, blobs: Blobs, *, max_page_bytes: int) -> None:
        self._blobs = blobs
        self._max_page_bytes = max_page_bytes

    def Exists(self, request: pb.ExistsRequest, context: grpc.ServicerContext) -> pb.ExistsResponse:
        names = self._checked(request.names, context)
        return pb.ExistsResponse(found=_answer(context, lambda: self._blobs.exists(names, _TIMEOUT_S)))

    def Read(self, request: pb.ReadRequest, context: grpc.ServicerContext) -> pb.ReadResponse:
        (name,) = self._checked([request.name], context)
        bound = min(request.max_bytes, self._max_page_bytes)
        try:
            data = _answer(context, lambda: self._blobs.read(name, bound, _TIMEOUT_S))
        except BlobTooLarge as error:
            return pb.ReadResponse(unfit=str(error))
        return pb.ReadResponse() if data is None else pb.ReadResponse(data=bytes(data))

    def Write(self, request: pb.WriteRequest, context: grpc.ServicerContext) -> pb.WriteResponse:
        (name,) = self._checked([request.name], context)
        if len(request.data) > self._max_page_bytes:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"a page of {len(request.data)} bytes, but kv_server.max_page_bytes is {self._max_page_bytes}",
            )
        if not context.is_active():  # it waited for a thread; its client has given the page up, and may have flushed
            context.abort(grpc.StatusCode.CANCELLED, "the call has ended")
        return pb.WriteResponse(taken=_answer(context, lambda: self._blobs.write(name, request.data, _TIMEOUT_S)))

    def Delete(self, request: pb.DeleteRequest, context: grpc.ServicerContext) -> pb.DeleteResponse:
        names = self._checked(request.names, context)
        _answer(context, lambda: self._blobs.delete(names, _TIMEOUT_S))
        return pb.DeleteResponse()

    def Flush(self, request: pb.FlushRequest, context: grpc.ServicerContext) -> pb.FlushResponse:
        scope = request.scope if request.HasField("scope") else None
        if scope is not None and not is_shown_name(BlobName(scope, "0" * 48)):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a scope is 32 hexadecimal digits")
        _answer(context, lambda: self._blobs.flush(scope, _TIMEOUT_S))
        logger.info("flushed %s", "all pages" if scope is None else f"scope {scope}")
        return pb.FlushResponse()

    def SetAside(self, request: pb.SetAsideRequest, context: grpc.ServicerContext) -> pb.SetAsideResponse:
        (name,) = self._checked([request.name], context)
        why = "".join(c for c in request.why[:200] if c.isprintable())
        _answer(context, lambda: self._blobs.set_aside(name, why))
        return pb.SetAsideResponse()

    def _checked(self, names: Sequence[pb.Name], context: grpc.ServicerContext) -> list[BlobName]:
        """Names become paths: nothing but digits gets through."""
        if len(names) > MAX_NAMES:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{len(names)} names, but a call has {MAX_NAMES} at most")
        found = [BlobName(name.scope, name.page) for name in names]
        if not all(map(is_shown_name, found)):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a name is 32 and 48 hexadecimal digits")
        return found


def _answer(context: grpc.ServicerContext, call: Callable[[], T]) -> T:
    try:
        return call()
    except (OSError, BlobsError) as error:
        logger.warning("a call failed: %s", error)
        context.abort(grpc.StatusCode.UNAVAILABLE, f"the pages cannot be reached: {type(error).__name__}")
        raise AssertionError("abort raises") from error


def _server(config: KVServerConfig, blobs: Blobs) -> grpc.Server:
    max_calls = 8 * config.threads
    pool = call_threads("kv-server", config.threads, max_calls)
    server = grpc.server(
        pool,
        interceptors=[DecodedMessages()],
        maximum_concurrent_rpcs=max_calls,
        options=[
            ("grpc.max_receive_message_length", config.max_page_bytes + MESSAGE_OVERHEAD),
            *PORT_OPTIONS,
        ],
    )
    service = PagesService(blobs, max_page_bytes=config.max_page_bytes)
    pb_grpc.add_PagesServicer_to_server(service, server)
    checks: Any = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", _NAME):
        checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server


def _blobs(config: KVServerConfig) -> DirectoryBlobs | MemoryStore:
    if config.max_bytes < config.max_page_bytes:
        raise ConfigError(
            f"kv_server.max_bytes is {config.max_bytes}, less than kv_server.max_page_bytes, {config.max_page_bytes}"
        )
    if config.directory is None:
        return MemoryStore(None, config.max_bytes, policy=config.policy, admission=config.admission)
    return DirectoryBlobs(Path(config.directory), config.max_bytes, policy=config.policy, admission=config.admission)
