"""The gRPC server around the services: port, health, reflection, limits.

The methods are in `grpc_service`; `service` decides when the server stops.
"""

import asyncio
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxserve.config.addresses import address_of
from jaxserve.config.schema import GrpcConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.gen import admin_pb2 as admin_pb
from jaxserve.serve.gen import admin_pb2_grpc as admin_grpc
from jaxserve.serve.gen import handoff_pb2 as handoff_pb
from jaxserve.serve.gen import handoff_pb2_grpc as handoff_grpc
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.grpc_access import BearerTokens
from jaxserve.serve.grpc_admin import AdminService, RouterAdminService
from jaxserve.serve.grpc_errors import TypedErrors
from jaxserve.serve.handoff_service import HANDOFF_NAME, HandoffService
from jaxserve.serve.key_files import KeyFiles
from jaxserve.serve.large_reads import LargeReads
from jaxserve.serve.ports import GRPC, HeldPort
from jaxserve.serve.tls import Certificates

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name

# A name of the health service: green while this process is worth keeping. It stays green during a drain, when the
# others are red, since a process that gets no new requests must still finish its old ones.
LIVE_NAME = "live"

_POLL_S = 0.01
_UNREAD_BYTES = 2**16 - 1  # of a call whose message nobody has asked for; HTTP/2 begins with so many
_HANDSHAKE_MS = 10_000  # until a connection has said that it speaks HTTP/2; gRPC's own limit is 120 s


class CountedService(Protocol):
    """A service that answers `Inference` calls: the engine's or the router's."""

    @property
    def num_live(self) -> int:
        """Calls that have not ended."""
        ...

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None: ...

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse: ...

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse: ...

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse: ...

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse: ...

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse: ...


class GrpcServer:
    """One listening port. Used on one event loop."""

    protocol = GRPC

    def __init__(
        self,
        service: CountedService,
        counts: DoorCounts,
        *,
        host: str,
        config: GrpcConfig,
        keys: KeyFiles,
        max_connections: int,
        port: HeldPort | None = None,
        admin: AdminService | RouterAdminService | None = None,
        handoff: HandoffService | None = None,
    ) -> None:
        """Reads certificates. `keys`: who may call, and whose a call is. `port` None: it is taken at the start.
        `admin` is for operators, `handoff` for routers. Raises ConfigError.

        Beyond `max_connections` new ones are closed, until others end.
        """
        assert config.port is not None, "no port, no service"
        self._host, self._config, self._port = host, config, port
        certificates = Certificates.of(config, "serve.grpc")
        self._credentials = None if certificates is None else certificates.grpc_credentials()
        self._service = service
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  (untyped, but documented)
        self._closing = False
        self._live: bool | None = None
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if keys.grpc.known is not None or keys.admins is not None:
            interceptors.append(BearerTokens(keys.grpc.known, keys.admins, counts))
        self._reads = LargeReads()
        interceptors.append(TypedErrors(counts, config, keys.grpc, self._reads))
        methods = [*pb.DESCRIPTOR.services_by_name["Inference"].methods_by_name]
        names = [SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME]
        if admin is not None:
            assert keys.admins is not None, "an operator's methods are never open"
            kind = "Admin" if isinstance(admin, AdminService) else "RouterAdmin"
            described = admin_pb.DESCRIPTOR.services_by_name[kind]
            methods += described.methods_by_name
            names.append(described.full_name)
        if handoff is not None:
            methods += handoff_pb.DESCRIPTOR.services_by_name["Handoff"].methods_by_name
            names.append(HANDOFF_NAME)
        for method in methods:
            counts.grpc.setdefault((method, grpc.StatusCode.OK.name), 0)
        self._server = grpc.aio.server(interceptors=interceptors, options=_options(config, max_connections))
        pb_grpc.add_InferenceServicer_to_server(self._service, self._server)
        if isinstance(admin, AdminService):
            admin_grpc.add_AdminServicer_to_server(admin, self._server)
        elif admin is not None:
            admin_grpc.add_RouterAdminServicer_to_server(admin, self._server)
        if handoff is not None:
            handoff_grpc.add_HandoffServicer_to_server(handoff, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, *, healthy: bool = True) -> int:
        """Listens and reports SERVING, or NOT_SERVING. Returns the port.

        Raises ConfigError when the address cannot be bound.
        """
        assert self._config.port is not None
        # When it fails to bind, gRPC would print a line of its own: so the address is checked before.
        held = self._port or HeldPort(self._host, self._config.port, "serve.grpc.port")
        held.close()
        address = address_of(self._host, held.number)
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}; another process was faster") from error
        await self.report(healthy)
        await self.report_live(True)
        await self._server.start()
        return port

    async def report(self, healthy: bool) -> None:
        """Health turns to SERVING or NOT_SERVING, until the next time. Nothing after `report_not_serving`."""
        if not self._closing:
            for name in ("", SERVICE_NAME):
                await self._health.set(name, _status(healthy))

    async def report_live(self, live: bool) -> None:
        """`report` for `LIVE_NAME` alone."""
        if live != self._live:
            self._live = live
            await self._health.set(LIVE_NAME, _status(live))

    async def report_not_serving(self) -> None:
        """Health turns to NOT_SERVING for good; calls go on, and so does `LIVE_NAME`."""
        await self.report(False)
        self._closing = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until every Generate call has ended. Health watches do not count: they never end."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._service.num_live:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives the others `grace_s`, then cancels them."""
        await self._server.stop(grace_s)
        self._reads.close()


def _options(config: GrpcConfig, max_connections: int) -> list[tuple[str, int]]:
    timeout_ms = round(config.keepalive_timeout_s * 1000)
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # log-probabilities of a long prompt are many megabytes
        # By itself gRPC lets a fast client send megabytes of each call ahead. A message that is read comes as a whole.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
        # Each connection takes a descriptor of the process, which the HTTP port and its probes need, too.
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.so_reuseport", 0),  # with it a second server on the same port would silently take half of the calls
        # A client whose network is cut sends no farewell; without pings it would hold its pages until its end.
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),  # measured: without it 60 s hold, despite the line above
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", round(config.min_ping_interval_s * 1000)),
    ]


def _status(healthy: bool) -> int:
    response = health_pb2.HealthCheckResponse
    return response.SERVING if healthy else response.NOT_SERVING
