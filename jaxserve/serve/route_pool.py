"""The replicas behind a router: their addresses, connections and health, and the choice of one for a request.

Calls are forwarded in `route_service`. Health is polled rather than watched: a replica that is stopped, or behind a cut
cable, sends no bad news, it is silent.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.config.schema import RouteConfig
from jaxserve.errors import ConfigError
from jaxserve.routing import Balancer, PromptKey, Router
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.route_access import BackendAccess

logger = logging.getLogger(__name__)

DNS_PREFIX = "dns:///"

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else two channels to one address share the memory of its failures
    ("grpc.initial_reconnect_backoff_ms", 200),  # a replica that was started again is found soon
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # the time that one attempt to connect gets
    # A call to a machine that has vanished must end. Servers of this package allow pings every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Backend:
    """One replica. Mutated by its pool alone, on one event loop."""

    def __init__(self, address: str, access: BackendAccess) -> None:
        self.address = address
        self.healthy = False
        self.reason = "it has not answered yet"
        self.listed = True  # False once DNS has dropped it: it ends what it has, and is the last resort
        self.look = asyncio.Event()  # set: check its health now
        self.gone = asyncio.Event()  # set when it answers no more, and replaced: its streams go on elsewhere
        self.channel = access.open(address, _OPTIONS)
        self.stub = pb_grpc.InferenceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)  # the package has no types


class Pool:
    """All replicas of one router. Used on one event loop."""

    def __init__(self, config: RouteConfig, router: Router, *, resolve: Resolve | None = None) -> None:
        """`resolve` gives the addresses of a name and port, None asks the system. Raises ConfigError."""
        self.changed = asyncio.Event()  # set whenever `healthy` may have changed
        self._config = config
        self._access = BackendAccess.of(config)
        self._resolve = resolve or resolve_name
        self._balancer = Balancer(router)
        self._backends: dict[str, Backend] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._risen = asyncio.Event()  # replaced when it is set
        self._static, self._names = split_replicas(config.replicas or ())

    @property
    def healthy(self) -> bool:
        """At least one replica takes requests."""
        return any(b.healthy for b in self._backends.values())

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call to a replica."""
        return self._access.metadata

    @property
    def well(self) -> list[Backend]:
        """Every replica that takes requests."""
        return [b for b in self._backends.values() if b.healthy]

    @property
    def obeys_header(self) -> bool:
        """Whether `choose` is to be given the replicas of a request's metadata (route.destination_header)."""
        return self._config.destination_header

    @property
    def uses_prompt(self) -> bool:
        """False: an empty key does for `choose`."""
        return self._balancer.uses_prompt

    def start(self) -> None:
        """Begins to check the replicas."""
        for address in self._static:
            self._add(address)
        for host, port in self._names:
            self._spawn(self._follow_name(host, port))

    async def close(self) -> None:
        """Cancels what is running and closes every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for backend in self._backends.values():
            await backend.channel.close()

    def choose(self, key: PromptKey, tried: Collection[str], wanted: Sequence[str] = ()) -> Backend | None:
        """A healthy replica that is not in `tried`, or None: the first of `wanted`, else the policy's choice.

        `wanted` are HOST:PORT as an endpoint picker writes them. It knows pods by their HTTP port, so a host is enough
        where one replica alone has it. Nothing is ever sent to an address that is not a replica's.
        """
        alive = [b for b in self._backends.values() if b.healthy and b.address not in tried]
        for address in wanted:
            host = address.rpartition(":")[0]
            there = [b for b in self._backends.values() if b.address.rpartition(":")[0] == host]
            for backend in alive:
                if backend.address == address or there == [backend]:
                    return backend
        # A replica that DNS has dropped is leaving, but is better than none while its replacements are starting.
        addresses = [b.address for b in alive if b.listed] or [b.address for b in alive]
        return self._backends[str(self._balancer.choose(key, addresses))] if addresses else None

    async def wait_well(self, timeout_s: float) -> None:
        """Until another replica is well, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._risen.wait(), timeout_s)

    @contextlib.contextmanager
    def carrying(self, key: PromptKey, backend: Backend) -> Iterator[None]:
        """Counts a request for as long as the block lasts."""
        self._balancer.start(key, backend.address)
        try:
            yield
        finally:
            self._balancer.end(backend.address)

    def suspect(self, backend: Backend, reason: str) -> None:
        """A call has found the replica dead: it gets no more calls until a check finds it healthy."""
        self._set_health(backend, False, reason)
        backend.look.set()

    def describe(self, tried: Collection[str]) -> str:
        """Each replica that is not in `tried`, with its fault, for a message."""
        if not self._backends:
            return "no name has an address yet"
        return "; ".join(f"{b.address}: {b.reason}" for b in self._backends.values() if b.address not in tried)

    # ---- health ----------------------------------------------------------------------------------------------------

    def _add(self, address: str) -> None:
        backend = self._backends[address] = Backend(address, self._access)
        self._spawn(self._watch(backend))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, backend: Backend) -> None:
        while self._is_needed(backend):
            reason, answers = await self._look(backend)
            self._set_health(backend, reason is None, reason or "")
            if not answers:
                backend.gone.set()
                backend.gone = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(backend.look.wait(), self._config.health_interval_s)
            backend.look.clear()
        del self._backends[backend.address]
        self._balancer.forget(backend.address)
        self.changed.set()
        logger.info("replica %s has left", backend.address)
        await backend.channel.close()

    def _is_needed(self, backend: Backend) -> bool:
        if backend.listed or self._balancer.load(backend.address):
            return True
        return backend.healthy and not any(b.listed and b.healthy for b in self._backends.values())

    async def _look(self, backend: Backend) -> tuple[str | None, bool]:
        """Checks a replica. Its fault, None when it is healthy; and whether it answers at all."""
        try:
            reply = await backend.health.Check(
                health_pb2.HealthCheckRequest(service=""), timeout=self._config.health_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            silent = error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
            return f"{error.code().name}, {error.details()}", not silent
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            return None, True
        return f"it says {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}", True

    def _set_health(self, backend: Backend, healthy: bool, reason: str) -> None:
        if healthy != backend.healthy:
            if healthy:
                logger.info("replica %s is well", backend.address)
                self._risen.set()
                self._risen = asyncio.Event()
            else:
                logger.warning("replica %s gets no more requests: %s", backend.address, reason)
                self._balancer.forget(backend.address)
        backend.healthy, backend.reason = healthy, reason
        self.changed.set()

    # ---- names -----------------------------------------------------------------------------------------------------

    async def _follow_name(self, host: str, port: int) -> None:
        """Keeps the replicas equal to the addresses of a name, such as that of a headless service of Kubernetes."""
        mine: set[str] = set()
        while True:
            try:
                found = set(await self._resolve(host, port))
            except (
                OSError,
                UnicodeError,
            ) as error:  # a name server that is down for a moment says nothing about the replicas
                logger.warning("cannot resolve %s: %s; the addresses stay as they are", host, error)
                found = mine
            for address in sorted(found - mine):
                if address not in self._backends:
                    self._add(address)
                self._backends[address].listed = True
            for address in mine - found:
                self._drop(address)
            mine = found
            await asyncio.sleep(self._config.dns_interval_s)

    def _drop(self, address: str) -> None:
        backend = self._backends.get(address)
        if backend is not None and address not in self._static:
            backend.listed = False


def split_replicas(replicas: Sequence[str]) -> tuple[list[str], list[tuple[str, int]]]:
    """Addresses as they are, and names to resolve with their ports. Raises ConfigError for anything else."""
    addresses: list[str] = []
    names: list[tuple[str, int]] = []
    for text in replicas:
        host, _, port = text.removeprefix(DNS_PREFIX).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16 or "/" in host:
            raise ConfigError(f"route.replicas has {text!r}, but must have HOST:PORT or {DNS_PREFIX}NAME:PORT")
        if text in addresses or (host, int(port)) in names:
            raise ConfigError(f"route.replicas has {text!r} twice; name each replica once")
        if text.startswith(DNS_PREFIX):
            names.append((host, int(port)))
        else:
            addresses.append(text)
    if not addresses and not names:
        raise ConfigError("there is nothing to route to: give --to HOST:PORT for each replica, or set route.replicas")
    return addresses, names


async def resolve_name(host: str, port: int) -> Sequence[str]:
    """Every address of `host`, as HOST:PORT. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
            for family, *_, address in found]  # fmt: skip
