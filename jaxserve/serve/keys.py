"""API keys: secrets from a file, and the check of the key that a caller presents. For every door.

Secrets come from a file and never from the config itself, since the config is printed at start. The check must not
reveal which secrets exist, or how near a wrong one came: all of them are compared, in constant time, on digests of one
length.
"""

import hashlib
import hmac
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jaxserve.errors import ConfigError

_OPTION = re.compile(r"[a-z_]+=\S*")


class ListedKey(NamedTuple):
    """A line of a file of callers' keys: `SECRET weight=4`, or `SECRET role=router`.

    Attributes:
      weight: how many parts this key has where others have one. Positive.
      is_router: its holder may say whose requests it passes on.
    """

    secret: str
    weight: float = 1.0
    is_router: bool = False


def read_keys(path: str, setting: str) -> tuple[str, ...]:
    """One secret a line; empty lines and those that begin with # do not count. `setting` names the field in errors.

    Raises ConfigError, also for a line with the options of a caller's key.
    """
    keys = _read_lines(path, setting)
    for number, key in enumerate(keys, start=1):
        if key != ListedKey(key.secret):
            raise ConfigError(
                f"{setting}: secret {number} of {path} has options, which only the keys of callers have "
                "(serve.http.api_keys_file, serve.grpc.tokens_file); leave them out"
            )
    return tuple(key.secret for key in keys)


def read_listed_keys(path: str, setting: str) -> tuple[ListedKey, ...]:
    """As `read_keys`, of callers' keys: behind a secret there may be options. Raises ConfigError."""
    return _read_lines(path, setting)


def _read_lines(path: str, setting: str) -> tuple[ListedKey, ...]:
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line and not line.startswith("#")]
    keys = tuple(_read_line(line, f"{setting}: line {number} of {path}") for number, line in numbered)
    if not keys:
        raise ConfigError(f"{setting}: {path} holds nothing; put one a line, or leave the setting null")
    return keys


def _read_line(line: str, where: str) -> ListedKey:
    """Options are the last words of a line; a secret may have blanks itself."""
    secret, weight, is_router = line, 1.0, False
    while (parts := secret.rsplit(maxsplit=1))[1:] and _OPTION.fullmatch(parts[1]):
        name, _, value = parts[1].partition("=")
        if name == "weight":
            weight = _read_weight(value, where)
        elif name == "role" and value == "router":
            is_router = True
        else:
            raise ConfigError(f"{where}: behind the secret there is {name}=, and only weight=NUMBER and role=router go")
        secret = parts[0]
    return ListedKey(secret, weight, is_router)


def _read_weight(text: str, where: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ConfigError(f"{where}: weight is {text!r:.40}, but must be a positive number, such as 4")
    return weight


class KnownKeys:
    """Holds digests, not the secrets."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """From now on these are known, and no others."""
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
