"""Files of secrets and certificates that settings name, read and checked at the start.

A certificate that does not load must stop the start: gRPC itself would only log it, with the first call.
"""

import ssl
from pathlib import Path
from typing import NamedTuple

from jaxserve.errors import ConfigError

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


class Tls(NamedTuple):
    """PEM texts: the certificate of this process, its key, and the authorities that have signed those of the others."""

    certificate: bytes
    key: bytes
    authorities: bytes


def read_secret(path: str, setting: str) -> bytes:
    """The secret in a file, without spaces around it. `setting` names the field in errors. Raises ConfigError."""
    return check_secret(_read(path, setting).strip(), f"{setting} ({path})")


def check_secret(secret: bytes, place: str) -> bytes:
    """The secret itself. Raises ConfigError for one that is too short or too long to be any."""
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"the secret in {place} has {len(secret)} bytes, but a secret has {MIN_SECRET_BYTES} to "
            f"{MAX_SECRET_BYTES}; make one with: openssl rand -hex 32"
        )
    return secret


def read_mutual_tls(certificate: str, key: str, authorities: str, prefix: str) -> Tls:
    """Reads the files of `tls_cert`, `tls_key` and `tls_ca`. `prefix` stands before those names in errors.

    Raises ConfigError for files that are missing, are no PEM, or do not belong together.
    """
    tls = Tls(
        _read(certificate, f"{prefix}tls_cert"), _read(key, f"{prefix}tls_key"), _read(authorities, f"{prefix}tls_ca")
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ConfigError) as error:
        raise ConfigError(
            f"{prefix}tls_cert {certificate} and {prefix}tls_key {key} are no pair of PEM files without a password: "
            f"{error}"
        ) from error
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise ConfigError(f"{prefix}tls_ca: {authorities} holds no certificates in PEM: {error}") from error
    return tls


def _no_password() -> str:
    raise ConfigError("the key asks for a password")


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
