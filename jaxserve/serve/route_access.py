"""The access of a router to its servers: certificates and a token of its own.

Certificates and tokens of clients are not passed on: they are for the router, which answers for its clients.
"""

import dataclasses
from pathlib import Path
from typing import Self

import grpc

from jaxserve.config.schema import RouteConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.keys import read_keys


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendAccess:
    """`credentials` None: without TLS. `metadata` goes with every call but health's.

    Two are equal if they were read from files of the same content.
    """

    files: tuple[bytes | None, ...]
    credentials: grpc.ChannelCredentials | None = dataclasses.field(compare=False)
    options: tuple[tuple[str, str], ...]
    metadata: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, config: RouteConfig) -> Self:
        """Reads the files. Raises ConfigError."""
        if (config.tls_cert is None) != (config.tls_key is None):
            raise ConfigError("route.tls_cert and route.tls_key go together; set both, or none")
        if config.tls_ca is None and (config.tls_cert is not None or config.tls_name is not None):
            raise ConfigError("route.tls_cert and route.tls_name are for servers with TLS; set route.tls_ca")
        token = read_keys(config.token_file, "route.token_file")[0] if config.token_file is not None else None
        files = tuple(_read(getattr(config, name), name) for name in ("tls_ca", "tls_key", "tls_cert"))
        return cls(
            files=files,
            credentials=None if config.tls_ca is None else grpc.ssl_channel_credentials(*files),
            options=() if config.tls_name is None else (("grpc.ssl_target_name_override", config.tls_name),),
            metadata=() if token is None else (("authorization", f"Bearer {token}"),),
        )

    def open(self, address: str, options: tuple[tuple[str, int], ...]) -> grpc.aio.Channel:
        """A channel; nothing is connected before the first call."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self.credentials, options=(*options, *self.options))


def _read(path: str | None, name: str) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"route.{name}: cannot read {path}: {error.strerror}") from error
