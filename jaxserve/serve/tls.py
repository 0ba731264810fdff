"""The certificates of a door: three PEM files, checked at the start and read again for each connection.

They are checked early, since a certificate that does not load must stop the server and not its first client; gRPC
itself would log the error and refuse every client. They are read again, since certificates are renewed more often than
servers start. While the files are unreadable or do not fit together, as in the middle of a renewal, the last good ones
stay in use.
"""

import dataclasses
import logging
import ssl
from pathlib import Path
from typing import Any, Protocol, Self

import grpc

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

_Contents = tuple[bytes, bytes, bytes | None]


class TlsFiles(Protocol):
    """The settings of a door about certificates. Paths, None where there is none."""

    @property
    def tls_cert(self) -> str | None: ...

    @property
    def tls_key(self) -> str | None: ...

    @property
    def tls_client_ca(self) -> str | None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Paths:
    """`section` names the settings in errors, such as "serve.http"."""

    certificate: str
    key: str
    authorities: str | None
    section: str

    def read(self) -> _Contents:
        """Raises ConfigError."""
        try:
            return (
                Path(self.certificate).read_bytes(),
                Path(self.key).read_bytes(),
                None if self.authorities is None else Path(self.authorities).read_bytes(),
            )
        except OSError as error:
            raise self._unusable(error) from error

    def load(self) -> ssl.SSLContext:
        """A context for sockets of Python, which speak HTTP/1.1. Raises ConfigError for files that are no PEM."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2  # as gRPC has it
        context.set_alpn_protocols(["http/1.1"])  # a client that speaks only HTTP/2 fails in the handshake
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")  # else a locked key would ask
            if self.authorities is not None:
                context.load_verify_locations(self.authorities)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise self._unusable(error) from error
        return context

    def _unusable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.section}.tls_cert ({self.certificate}), tls_key and tls_client_ca must be PEM files that belong "
            f"together: {error}"
        )


class Certificates:
    """The files of one door as they are now. Handshakes may use it on any thread.

    Attributes:
      asks_clients: a client must show a certificate that one of the authorities has signed.
    """

    def __init__(self, paths: _Paths) -> None:
        """Reads the files. Raises ConfigError."""
        self.asks_clients = paths.authorities is not None
        self._paths = paths
        self._is_usable = True
        self._now = paths.read(), paths.load()

    @classmethod
    def of(cls, files: TlsFiles, section: str) -> Self | None:
        """Those of a door; None for a door without TLS. `section` names the settings in errors, such as "serve.http".

        Raises ConfigError for settings that contradict each other, and for files that are missing or are no PEM.
        """
        cert, key, client_ca = files.tls_cert, files.tls_key, files.tls_client_ca
        if (cert is None) != (key is None):
            raise ConfigError(f"{section}.tls_cert and {section}.tls_key go together; set both, or none")
        if cert is None or key is None:
            if client_ca is not None:
                raise ConfigError(
                    f"{section}.tls_client_ca asks clients for certificates, which needs {section}.tls_cert"
                )
            return None
        return cls(_Paths(certificate=cert, key=key, authorities=client_ca, section=section))

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a port of gRPC."""
        # gRPC keeps the last configuration where it is given None, which its stubs do not know.
        fetch: Any = lambda: self._configuration() if self._renew() else None  # noqa: E731
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), fetch, require_client_authentication=self.asks_clients
        )

    def context(self) -> ssl.SSLContext:
        """For a port of sockets. Each handshake changes from it to one of the files as they are then."""
        _, first = self._now

        def change(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            self._renew()
            _, connection.context = self._now

        first.sni_callback = change  # called for clients that name no server, too
        return first

    def _renew(self) -> bool:
        """Takes the files as they are now; returns whether they differ from the last ones that could be used."""
        try:
            contents = self._paths.read()
            if contents == self._now[0]:
                return False
            context = self._paths.load()
            if self._paths.read() != contents:  # they are being renewed just now
                return False
        except ConfigError as error:
            if self._is_usable:
                logger.warning("%s; the last certificates stay in use", error)
            self._is_usable = False
            return False
        self._now = contents, context
        self._is_usable = True
        logger.info("%s: the certificates were renewed", self._paths.section)
        return True

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        (certificate, key, authorities), _ = self._now
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authorities)
