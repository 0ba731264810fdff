"""Doors without keys: a config that closes one and leaves the other open was hardly meant so.

The routes of an HTTP door that answer nobody's prompts are of no concern here, and neither are tokens of operators.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.config.addresses import is_loopback
from jaxserve.config.schema import ServeConfig
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

_KEYS: Mapping[str, str] = {"grpc": "serve.grpc.tokens_file", "http": "serve.http.api_keys_file"}


class _Doors(NamedTuple):
    """Doors with a port, by whether a caller needs a key or a certificate."""

    closed: list[str]
    open: list[str]


def refuse_half_closed(config: ServeConfig) -> None:
    """Raises ConfigError when other machines reach a door without a key beside one that wants keys, unless
    `serve.open_doors` names it; and when that names a door which is not open, or `open_metrics` a route."""
    if config.http.open_metrics and config.http.api_keys_file is None:
        raise ConfigError(
            "serve.http.open_metrics is true, but no route needs a key; set serve.http.api_keys_file, or leave it out"
        )
    doors = _doors(config)
    for name in config.open_doors:
        if name not in doors.open:
            why = f"{_KEYS[name]} or serve.{name}.tls_client_ca is set" if name in doors.closed else "it has no port"
            raise ConfigError(f"serve.open_doors has {name}, but {why}; leave {name} out of it")
    unsaid = [name for name in doors.open if name not in config.open_doors]
    if doors.closed and unsaid and not is_loopback(config.host):
        [closed], [open_] = doors.closed, unsaid
        raise ConfigError(
            f"callers of serve.{closed}.port need a key, but anyone who reaches {config.host} may call "
            f"serve.{open_}.port; set {_KEYS[open_]} too (the files may be one), or serve.open_doors=[{open_}]"
        )


def warn_of_open(config: ServeConfig) -> None:
    """Logs a line about doors that want no key, where that may be a mistake."""
    doors = _doors(config)
    unsaid = [name for name in doors.open if name not in config.open_doors]
    settings = " and ".join(_KEYS[name] for name in unsaid)
    if unsaid and doors.closed:
        logger.warning("callers of %s need no key, unlike those of %s: set %s", *unsaid, *doors.closed, settings)
    elif unsaid and not is_loopback(config.host):
        logger.warning("anyone who reaches %s may call: no key is asked for (%s)", config.host, settings)


def _doors(config: ServeConfig) -> _Doors:
    ports = {"grpc": config.grpc.port, "http": config.http.port}
    keys = {"grpc": config.grpc.tokens_file, "http": config.http.api_keys_file}
    certificates = {"grpc": config.grpc.tls_client_ca, "http": config.http.tls_client_ca}
    found = _Doors([], [])
    for name in _KEYS:
        if ports[name] is not None:
            is_open = keys[name] is None and certificates[name] is None
            (found.open if is_open else found.closed).append(name)
    return found
