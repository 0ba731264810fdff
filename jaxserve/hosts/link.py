"""The common part of both ends of the connection: names, settings of the transport, credentials, and liveness.

The gRPC options bound messages and detect a dead peer. What follows from a silence is decided at the ends (`leader`,
`follower`).
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import grpc

from jaxserve.config.secret_files import Tls

METHOD = "/jaxserve.hosts.Plans/Attend"
SERVICE, NAME = METHOD[1:].split("/")

BEATS = 4  # heartbeats in the time after which a silent process counts as dead

# Steps that process 0 may be ahead of the last one that all others have reported, beyond `hosts.check_every`. With
# collectives the devices keep step anyway; without any, this bounds the queues.
MAX_AHEAD = 256

GREETING_S = 10.0  # for a process to prove that it belongs here
MAX_STRANGERS = 32  # connections that have not proved it yet; one more ends the oldest
_MAX_CONNECTIONS = 512  # beyond those of the processes


class Trust(NamedTuple):
    """The means by which processes trust each other. `secret` is empty only where no other host reaches the port."""

    secret: bytes = b""
    tls: Tls | None = None

    @property
    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of process 0. With TLS, a client needs a certificate that the authorities have signed."""
        if self.tls is None:
            return grpc.insecure_server_credentials()
        return grpc.ssl_server_credentials(
            [(self.tls.key, self.tls.certificate)],
            root_certificates=self.tls.authorities,
            require_client_auth=True,
        )

    def connect(self, address: str, options: list[tuple[str, int]]) -> grpc.Channel:
        """The channel of another process to process 0."""
        if self.tls is None:
            return grpc.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(self.tls.authorities, self.tls.key, self.tls.certificate)
        return grpc.secure_channel(address, credentials, options=options)


class Peer(NamedTuple):
    """A process, as messages name it."""

    process_id: int
    host: str
    address: str

    def __str__(self) -> str:
        at = f", {self.address}" if self.address else ""
        return f"process {self.process_id} ({self.host}{at})"


def server_options(heartbeat_s: float, num_processes: int, max_bytes: int) -> list[tuple[str, int]]:
    """gRPC options of process 0, which strangers may reach: each connection must soon begin a stream, or it ends."""
    greeting_ms = int(GREETING_S * 1000)
    return [
        *transport_options(heartbeat_s, max_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", greeting_ms),
        ("grpc.max_connection_idle_ms", greeting_ms),
        ("grpc.max_concurrent_streams", 1),
        ("grpc.max_metadata_size", 8192),
        ("grpc.max_allowed_incoming_connections", num_processes + _MAX_CONNECTIONS),
    ]


def transport_options(heartbeat_s: float, max_bytes: int) -> list[tuple[str, int]]:
    """gRPC options of both ends: pings by its own threads, so that they come even while Python is busy loading.

    `max_bytes`: a longer message ends the connection before its bytes are taken.
    """
    quarter_ms = max(1, int(heartbeat_s * 250))  # silence until a ping is sent; its answer may take the other three
    return [
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
        ("grpc.enable_http_proxy", 0),  # hosts of one service reach each other directly
        ("grpc.keepalive_time_ms", quarter_ms),
        ("grpc.keepalive_timeout_ms", 3 * quarter_ms),
        ("grpc.http2.ping_timeout_ms", 3 * quarter_ms),  # without it the default of 60 s holds
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", max(1, quarter_ms // 2)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


class Hearing:
    """The times at which peers were last heard. `heard` from any thread, `silent` from the watching thread."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._last_s: dict[int, float] = {}
        self._looked_s = clock()

    def heard(self, process_id: int) -> None:
        self._last_s[process_id] = self._clock()

    def silence_s(self, process_id: int) -> float:
        """Seconds since the peer was last heard; 0 before the watch began."""
        now_s = self._clock()
        return now_s - self._last_s.get(process_id, now_s)

    def silent(self) -> list[tuple[int, float]]:
        """(process, seconds) of each that has not been heard for longer than the limit.

        A process that was asleep itself (a suspended machine, a stopped process) has missed the frames of others: then
        all peers get their time again.
        """
        now_s = self._clock()
        slept, self._looked_s = now_s - self._looked_s > self._limit_s / 2, now_s
        if slept:
            self._last_s = dict.fromkeys(self._last_s, now_s)
        return [(p, now_s - last_s) for p, last_s in self._last_s.items() if now_s - last_s > self._limit_s]
