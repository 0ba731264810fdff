"""The replicas behind a router: their addresses, connections and health, and the choice of one for a request.

A suspect (`suspects`) gets a replica of the fleet that is emptied for it, rather than a server that only waits for
suspects: there is nothing to configure, no device stands idle, and after two deaths the servers that were started again
are empty anyway.

Calls are forwarded in `route_service`. Health is polled rather than watched: a replica that is stopped, or behind a cut
cable, sends no bad news, it is silent.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.config.schema import RouteConfig
from jaxserve.errors import ConfigError
from jaxserve.routing import Balancer, PromptKey, Router, create_router
from jaxserve.serve.gen import handoff_pb2 as handoff_pb
from jaxserve.serve.gen import handoff_pb2_grpc as handoff_grpc
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.route_access import BackendAccess

logger = logging.getLogger(__name__)

DNS_PREFIX = "dns:///"
RENEW_S = 10.0  # between looks at the files of certificates and token
_OLD_CHANNEL_S = 3600.0  # for calls over a connection with the certificates of before
_EMPTY_S = 0.05  # between questions whether a replica has nothing left to do
_LINE_S = 1.0  # between looks of a request that waits in line, at whether its client still wants it

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


class Parting(asyncio.Event):
    """Set when the streams of a replica are to go on elsewhere.

    Attributes:
      died: the replica answers no more; else it is emptied for a suspect.
    """

    died = False

    async def cancel(self, call: grpc.aio.Call) -> None:
        """Ends a call when it is set: nothing else would, if the replica is stopped and not dead."""
        await self.wait()
        call.cancel()


class Place(NamedTuple):
    """Where a request runs next. `backend` None: nowhere. `alone`: the replica runs nothing else."""

    backend: "Backend | None"
    alone: bool


class ReplicaState(NamedTuple):
    """One replica as its router sees it: `num_running` of its own requests there, `num_requests` since it was found."""

    address: str
    healthy: bool
    num_running: int
    num_requests: int


class Backend:
    """One replica. Mutated by its pool alone, on one event loop."""

    def __init__(self, address: str, access: BackendAccess) -> None:
        self.address = address
        self.healthy = False
        self.reason = "it has not answered yet"
        self.listed = True  # False once DNS has dropped it: it ends what it has, and is the last resort
        self.look = asyncio.Event()  # set: check its health now
        self.parting = Parting()  # replaced when it is set
        self.num_requests = 0  # that were sent to it
        self.role: int | None = None  # in handoffs; None: it takes part in none, or has not said so yet
        self.connect(access)

    def connect(self, access: BackendAccess) -> None:
        """From now on calls go over a channel of their own; running ones stay on the last one."""
        self.channel = access.open(self.address, _OPTIONS)
        self.stub = pb_grpc.InferenceStub(self.channel)
        self.handoff: Any = handoff_grpc.HandoffStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)  # the package has no types


class Pool:
    """All replicas of one router. Used on one event loop.

    Where some compute prompts for others, the policy chooses among these, since it knows which prompts they have seen,
    and the least loaded one of the others answers.
    """

    def __init__(self, config: RouteConfig, router: Router, *, resolve: Resolve | None = None) -> None:
        """`resolve` gives the addresses of a name and port, None asks the system. Raises ConfigError."""
        self._answering = Balancer(create_router("least_load"))
        self.changed = asyncio.Event()  # set whenever `healthy` may have changed
        self._config = config
        self._access = BackendAccess.of(config)
        self._resolve = resolve or resolve_name
        self._balancer = Balancer(router)
        self._backends: dict[str, Backend] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._risen = asyncio.Event()  # set when a waiting request may find a replica, and replaced
        self._line: list[object] = []  # the suspects that want a replica for themselves, first come first served
        self._reserved: Backend | None = None  # for the first in line
        self._static, self._names = split_replicas(config.replicas or ())

    @property
    def healthy(self) -> bool:
        """At least one replica takes requests."""
        return any(b.healthy for b in self._backends.values())

    @property
    def faults(self) -> list[str]:
        """Of every replica that should be well and is not, its address and why."""
        return [f"{b.address}: {b.reason}" for b in self._backends.values() if b.listed and not b.healthy]

    @property
    def num_listed(self) -> int:
        """Replicas that should be well."""
        return sum(b.listed for b in self._backends.values())

    @property
    def states(self) -> list[ReplicaState]:
        """Of every replica."""
        return [
            ReplicaState(b.address, b.healthy, self._balancer.load(b.address), b.num_requests)
            for b in self._backends.values()
        ]

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

    @property
    def has_reserved(self) -> bool:
        """A replica that is well is kept for a suspect, and will soon take other requests again."""
        return self._reserved is not None

    def start(self) -> None:
        """Begins to check the replicas."""
        for address in self._static:
            self._add(address)
        for host, port in self._names:
            self._spawn(self._follow_name(host, port))
        if self._config.tls_ca is not None or self._config.token_file is not None:
            self._spawn(self._follow_files())

    async def close(self) -> None:
        """Cancels what is running and closes every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for backend in self._backends.values():
            await backend.channel.close()

    @property
    def is_apart(self) -> bool:
        """Whether a replica is well that computes prompts for others, and one that takes them."""
        roles = {b.role for b in self._backends.values() if b.healthy}
        return handoff_pb.ROLE_PREFILL in roles and bool(roles & {handoff_pb.ROLE_DECODE, handoff_pb.ROLE_BOTH})

    def choose_prefill(self, key: PromptKey, tried: Collection[str]) -> Backend | None:
        """A healthy replica that computes prompts for others and is not in `tried`, by the policy."""
        alive = [
            b.address
            for b in self._backends.values()
            if b.healthy and b.role == handoff_pb.ROLE_PREFILL and b.address not in tried
        ]
        return self._backends[str(self._balancer.choose(key, alive))] if alive else None

    def choose(
        self, key: PromptKey, tried: Collection[str], wanted: Sequence[str] = (), *, reserved_too: bool = False
    ) -> Backend | None:
        """A healthy replica that is not in `tried`, or None: the first of `wanted`, else the policy's choice.

        One that computes prompts for others is chosen only when no other is well, and one that is kept for a suspect
        only with `reserved_too`, for calls that compute nothing.

        `wanted` are HOST:PORT as an endpoint picker writes them. It knows pods by their HTTP port, so a host is enough
        where one replica alone has it. Nothing is ever sent to an address that is not a replica's.
        """
        alive = [b for b in self.well if b.address not in tried and (reserved_too or b is not self._reserved)]
        for address in wanted:
            host = address.rpartition(":")[0]
            there = [b for b in self._backends.values() if b.address.rpartition(":")[0] == host]
            for backend in alive:
                if backend.address == address or there == [backend]:
                    return backend
        # A replica that DNS has dropped is leaving, but is better than none while its replacements are starting.
        addresses = [b.address for b in self._able([b for b in alive if b.listed] or alive)]
        if not addresses:
            return None
        if self.is_apart:
            return self._backends[str(self._answering.choose((), addresses))]
        return self._backends[str(self._balancer.choose(key, addresses))]

    def _able(self, backends: Sequence[Backend]) -> list[Backend]:
        """Those that answer requests: not those that compute prompts for others, while any other is well."""
        if all(b.role == handoff_pb.ROLE_PREFILL for b in self.well):
            return list(backends)
        return [b for b in backends if b.role != handoff_pb.ROLE_PREFILL]

    async def wait_well(self, timeout_s: float) -> None:
        """Until another replica is well or no longer reserved, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._risen.wait(), timeout_s)

    @contextlib.contextmanager
    def carrying(self, key: PromptKey, backend: Backend) -> Iterator[None]:
        """Counts a request for as long as the block lasts."""
        backend.num_requests += 1
        for balancer in (self._balancer, self._answering):
            balancer.start(key, backend.address)
        try:
            yield
        finally:
            for balancer in (self._balancer, self._answering):
                balancer.end(backend.address)
            if backend is self._reserved:
                self._wake_waiting()

    @contextlib.asynccontextmanager
    async def reserve(self, wait_s: float, is_over: Callable[[], bool]) -> AsyncIterator[Place]:
        """A replica that runs no other request for as long as the block lasts. One suspect at a time has one.

        The replica with the fewest requests is emptied: it gets no new ones, and those that it has go on at others, if
        any are well. Requests that came another way than through this router cannot be moved: if there still are some
        after `wait_s` seconds, the suspect runs beside them, and its place is not `alone`.

        It has no backend when none was well for `wait_s` seconds, or when `is_over`, which is asked once a second.
        """
        ticket = object()
        self._line.append(ticket)
        try:
            yield await self._empty(ticket, wait_s, is_over)
        finally:
            if self._line[0] is ticket:
                self._reserved = None
            self._line.remove(ticket)
            self._wake_waiting()

    async def _empty(self, ticket: object, wait_s: float, is_over: Callable[[], bool]) -> Place:
        now_s = asyncio.get_running_loop().time
        well_s = now_s()  # when a replica was last well
        first_s: float | None = None  # when the first one was reserved
        while not is_over():
            if self._line[0] is not ticket:
                await self.wait_well(_LINE_S)
                well_s = now_s()
                continue
            listed = self._able([b for b in self.well if b.listed] or self.well)
            backend = min(listed, key=lambda b: (self._balancer.load(b.address), b is not self._reserved), default=None)
            self._reserved = backend
            if backend is None:
                if now_s() - well_s >= wait_s:
                    break
                await self.wait_well(min(_LINE_S, wait_s))
                continue
            well_s = now_s()
            first_s = well_s if first_s is None else first_s
            if self._balancer.load(backend.address) and len(listed) > 1:
                self._part(backend, died=False)
            if not self._balancer.load(backend.address) and await self._has_no_work(backend):
                return Place(backend, alone=True)
            if now_s() - first_s >= wait_s:
                return Place(backend, alone=False)
            await self.wait_well(_EMPTY_S)
        return Place(None, alone=False)

    async def _has_no_work(self, backend: Backend) -> bool:
        """By its own word, which is also the proof that it is still there."""
        try:
            load = await backend.stub.GetLoad(
                pb.GetLoadRequest(), timeout=self._config.health_timeout_s, metadata=self.metadata
            )
        except grpc.aio.AioRpcError as error:
            self.suspect(backend, error.details() or error.code().name)
            return False
        return load.accepting and not load.num_running and not load.num_waiting

    def _part(self, backend: Backend, *, died: bool) -> None:
        parting, backend.parting = backend.parting, Parting()
        parting.died = died
        parting.set()

    def _wake_waiting(self) -> None:
        self._risen.set()
        self._risen = asyncio.Event()

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
            reason, ends_streams = await self._look(backend)
            self._set_health(backend, reason is None, reason or "")
            if not ends_streams:
                self._part(backend, died=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(backend.look.wait(), self._config.health_interval_s)
            backend.look.clear()
        del self._backends[backend.address]
        self._balancer.forget(backend.address)
        self._answering.forget(backend.address)
        self.changed.set()
        logger.info("replica %s has left", backend.address)
        await backend.channel.close()

    def _is_needed(self, backend: Backend) -> bool:
        if backend.listed or self._balancer.load(backend.address):
            return True
        return backend.healthy and not any(b.listed and b.healthy for b in self._backends.values())

    async def _look(self, backend: Backend) -> tuple[str | None, bool]:
        """Checks a replica. Its fault, None when it is healthy; and whether its streams still end by themselves.

        They do not when it is silent. Where no connection can be made, those of a process that is gone have ended, and
        those of a server that ends in order go on: it takes no connections then, and still has answers on the way.
        """
        try:
            reply = await backend.health.Check(
                health_pb2.HealthCheckRequest(service=""), timeout=self._config.health_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}, {error.details()}", error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            if not backend.healthy:
                await self._ask_role(backend)
            return None, True
        return f"it says {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}", True

    async def _ask_role(self, backend: Backend) -> None:
        """A server of an older version, or without handoffs, does not know the method."""
        try:
            reply = await backend.handoff.GetRole(
                handoff_pb.GetRoleRequest(), timeout=self._config.health_timeout_s, metadata=self.metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                logger.warning("replica %s does not say its role: %s", backend.address, error.details())
            backend.role = None
        else:
            backend.role = reply.role
            logger.info("replica %s has the role %s", backend.address, handoff_pb.Role.Name(reply.role))

    def _set_health(self, backend: Backend, healthy: bool, reason: str) -> None:
        if healthy != backend.healthy:
            if healthy:
                logger.info("replica %s is well", backend.address)
                self._wake_waiting()
            else:
                logger.warning("replica %s gets no more requests: %s", backend.address, reason)
                self._balancer.forget(backend.address)
        backend.healthy, backend.reason = healthy, reason
        self.changed.set()

    async def _follow_files(self) -> None:
        """Connects anew when certificates or the token have been renewed. A channel of gRPC keeps what it was given."""
        is_usable = True
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                access = BackendAccess.of(self._config)
            except ConfigError as error:
                if is_usable:
                    logger.warning("%s; the last certificates and token stay in use", error)
                is_usable = False
                continue
            is_usable = True
            if access == self._access:
                continue
            self._access = access
            logger.info("certificates or token were renewed: the router connects anew")
            for backend in self._backends.values():
                self._spawn(backend.channel.close(_OLD_CHANNEL_S))
                backend.connect(access)

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
        in_brackets = host.startswith("[") and host.endswith("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16 or "/" in host or (":" in host) != in_brackets:
            raise ConfigError(
                f"route.replicas has {text!r}, but must have HOST:PORT ([::1]:PORT for IPv6) or {DNS_PREFIX}NAME:PORT"
            )
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
