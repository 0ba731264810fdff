"""What both ends of the connection share: names, settings of the transport, and liveness.

Owns the method's name, the gRPC options that make a dead peer noticed, and the memory of when a peer was last heard.
Refuses to decide what a silence means: the ends do.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

METHOD = "/jaxserve.hosts.Plans/Attend"
SERVICE, NAME = METHOD[1:].split("/")

BEATS = 4  # heartbeats in the time after which a silent process counts as dead

# Steps that process 0 may be ahead of the last one that all others have reported, beyond `hosts.check_every`. With
# collectives the devices keep step anyway; without any, this is what bounds the queues.
MAX_AHEAD = 256


class Peer(NamedTuple):
    """A process, as messages name it."""

    process_id: int
    host: str
    address: str

    def __str__(self) -> str:
        at = f", {self.address}" if self.address else ""
        return f"process {self.process_id} ({self.host}{at})"


def transport_options(heartbeat_s: float) -> list[tuple[str, int]]:
    """gRPC options of both ends: pings by its own threads, so that they come even while Python is busy loading."""
    quarter_ms = max(1, int(heartbeat_s * 250))  # silence until a ping is sent; its answer may take the other three
    return [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
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
    """When each peer was last heard. `heard` from any thread, `silent` from the one that watches."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._last_s: dict[int, float] = {}
        self._looked_s = clock()

    def heard(self, process_id: int) -> None:
        self._last_s[process_id] = self._clock()

    def silence_s(self, process_id: int) -> float:
        """Seconds since it was last heard; 0 when nobody was listening yet."""
        now_s = self._clock()
        return now_s - self._last_s.get(process_id, now_s)

    def silent(self) -> list[tuple[int, float]]:
        """(process, seconds) of each that has not been heard for longer than the limit.

        Whoever was asleep itself (a suspended machine, a stopped process) has missed what others said: then all get
        their time again.
        """
        now_s = self._clock()
        slept, self._looked_s = now_s - self._looked_s > self._limit_s / 2, now_s
        if slept:
            self._last_s = dict.fromkeys(self._last_s, now_s)
        return [(p, now_s - last_s) for p, last_s in self._last_s.items() if now_s - last_s > self._limit_s]
