"""The certificates of a door: three PEM files, checked when the server starts.

They are checked early, since a certificate that does not load must stop the server and not its first client; gRPC
itself would log the error and refuse every client.
"""

import dataclasses
import ssl
from pathlib import Path
from typing import Protocol

from jaxserve.errors import ConfigError


class TlsFiles(Protocol):
    """The settings of a door about certificates. Paths, None where there is none."""

    @property
    def tls_cert(self) -> str | None: ...

    @property
    def tls_key(self) -> str | None: ...

    @property
    def tls_client_ca(self) -> str | None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """The bytes of the files, and a context made of them for sockets of Python.

    Attributes:
      authorities: those that sign the certificates of clients; None: clients need none.
    """

    certificate: bytes
    key: bytes
    authorities: bytes | None
    context: ssl.SSLContext


def read_tls(files: TlsFiles, section: str) -> ServerTls | None:
    """Reads the files. None for a door without TLS. `section` names the settings in errors, such as "serve.http".

    Raises ConfigError for settings that contradict each other, and for files that are missing or are no PEM.
    """
    cert, key, client_ca = files.tls_cert, files.tls_key, files.tls_client_ca
    if (cert is None) != (key is None):
        raise ConfigError(f"{section}.tls_cert and {section}.tls_key go together; set both, or none")
    if cert is None or key is None:
        if client_ca is not None:
            raise ConfigError(f"{section}.tls_client_ca asks clients for certificates, which needs {section}.tls_cert")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # as gRPC has it
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # without it a locked key would ask at the terminal
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return ServerTls(
            certificate=Path(cert).read_bytes(),
            key=Path(key).read_bytes(),
            authorities=None if client_ca is None else Path(client_ca).read_bytes(),
            context=context,
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"{section}.tls_cert ({cert}), tls_key and tls_client_ca must be PEM files that belong together: {error}"
        ) from error
