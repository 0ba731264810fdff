"""Ports that are bound before minutes are spent on loading, and listened on only when the server can answer.

Meanwhile a client that connects is refused at once, so balancers and probes see a server that is not there yet, and
another server cannot take the port. gRPC takes no sockets: its server binds the same port again when this one has
released it.
"""

import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple, Self

from jaxserve.config.addresses import address_of
from jaxserve.config.schema import ServeConfig
from jaxserve.errors import ConfigError

GRPC, HTTP = "gRPC", "HTTP"  # what is spoken on a port, as a start names it


class HeldPort:
    """A bound socket. Ends by `take` or `close`."""

    def __init__(self, host: str, port: int, setting: str, host_setting: str = "serve.host") -> None:
        """`port` 0 takes a free one. Raises ConfigError, which names the settings to change."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol named, asyncio turns Nagle's algorithm off for the connections: else each event of a stream
        # waits for the client's delayed acknowledgement of the one before, 40 ms.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            # Lets a restart take the port of connections that linger; a second live server still cannot.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            # Without a listener, Linux would give the port to the next process with the same options.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise ConfigError(
                f"cannot listen on {address_of(host, port)}: {error}; set {host_setting} or {setting}, 0 takes a free "
                "port"
            ) from error
        self.number: int = self._socket.getsockname()[1]

    def take(self) -> socket.socket:
        """The socket, to listen on. A restart may take its port even while accepted connections linger."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return self._socket

    def close(self) -> None:
        """Releases the port, unless it was taken and is listened on."""
        self._socket.close()


class HeldPorts(NamedTuple):
    """The ports of all doors in the config."""

    grpc: HeldPort | None = None
    http: HeldPort | None = None

    @classmethod
    def of(cls, config: ServeConfig) -> Self:
        """Holds all ports. Raises ConfigError for the first that cannot be bound, and then holds none."""
        grpc = None if config.grpc.port is None else HeldPort(config.host, config.grpc.port, "serve.grpc.port")
        try:
            http = None if config.http.port is None else HeldPort(config.host, config.http.port, "serve.http.port")
        except ConfigError:
            if grpc is not None:
                grpc.close()
            raise
        return cls(grpc, http)


@contextlib.contextmanager
def hold_ports(config: ServeConfig) -> Iterator[HeldPorts]:
    """Holds the ports for the block, in which the servers take them. Raises ConfigError."""
    ports = HeldPorts.of(config)
    try:
        yield ports
    finally:
        for port in ports:
            if port is not None:
                port.close()
