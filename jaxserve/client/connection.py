"""The connection of a client to a server: channel, certificates, token, and the typed form of a failed call.

The blocking and the asyncio client share this module.
"""

import dataclasses
import os
from pathlib import Path

import grpc

from jaxserve.errors import ConfigError, JaxserveError, Status
from jaxserve.serve.status import status_of_call
from jaxserve.serve.status_details import is_draining, retry_after_s

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # prompt log-probabilities exceed gRPC's 4 MiB
    # A server whose machine vanished sends no farewell, and a call without a deadline would wait for ever. gRPC servers
    # without other settings, such as Ray's proxy, drop clients that ping more often than every five minutes.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),  # a server that was started again is found soon
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates, as paths of PEM files.

    Attributes:
      ca: authorities that may have signed the server's certificate; None: those of the system.
      certificate, key: the client's own, both or none, for servers that ask (mutual TLS).
      server_name: the name that the certificate must have, where it is not that of the address.
    """

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("a certificate needs its key, and a key its certificate; give both, or none")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises ConfigError."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))

    def options(self) -> tuple[tuple[str, str], ...]:
        """Further options of the channel."""
        return () if self.server_name is None else (("grpc.ssl_target_name_override", self.server_name),)


class RequestFailed(JaxserveError):
    """The call ended without an answer.

    `status` is the kind of the error; the text is the server's. `retry_after_s` is the server's estimate of when to try
    again, None where it gives none. `draining`: the server is being shut down, and has not failed.
    """

    def __init__(
        self, status: Status, message: str, *, retry_after_s: float | None = None, draining: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.draining = draining


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of every call. Raises ConfigError for a token that no header can carry."""
    if token is None:
        return ()
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise ConfigError("a token is printable ASCII without spaces")
    return (("authorization", f"Bearer {token}"),)


def failure_of(error: grpc.RpcError) -> RequestFailed:
    """The typed form of an error of gRPC."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError), f"an error without a status: {error!r}"
    text = error.details() or str(error.code())
    return RequestFailed(
        status_of_call(error.code(), text), text, retry_after_s=retry_after_s(error), draining=is_draining(error)
    )


def _read(path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
