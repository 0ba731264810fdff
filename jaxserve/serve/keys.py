"""API keys: secrets from a file, and the check of the key that a caller presents. For every door.

Secrets come from a file and never from the config itself, since the config is printed at start. The check must not
reveal which secrets exist, or how near a wrong one came: all of them are compared, in constant time, on digests of one
length.
"""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from jaxserve.errors import ConfigError


def read_keys(path: str, setting: str) -> tuple[str, ...]:
    """One secret a line; empty lines and those that begin with # do not count. `setting` names the field in errors.

    Raises ConfigError.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error}") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{setting}: {path} holds nothing; put one a line, or leave the setting null")
    return keys


class KnownKeys:
    """Immutable. Holds digests, not the secrets."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def accept(self, authorization: str) -> bool:
        """Whether a header `authorization: Bearer KEY` has one of them."""
        given, found = _digest(key_of(authorization).encode("latin-1", errors="replace")), False
        for known in self._digests:  # all of them, even after a match
            found |= hmac.compare_digest(given, known)
        return found


def key_of(authorization: str) -> str:
    """The key of a header `authorization: Bearer KEY`, however it is spelled; "" where the header has none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
