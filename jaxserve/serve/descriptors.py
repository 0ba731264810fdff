"""File descriptors: how many this process may open, and the number of connections that follows from it.

The soft limit is 1,024 on most systems, for the sake of programs that call `select`; the hard one is what an operator
has set. A server that keeps the first has no descriptor left for a probe after a thousand connections.
"""

import logging
import resource

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

_MOST = 2**20  # containers may have a limit of a billion, which is as good as this
_LEAST_FREE = 64  # for all else: listening ports, logs, the device, files that are read, HTTP's few spares
_FEWEST = 8
_MOST_CONNECTIONS = 2**14  # by default: each costs some kilobytes, whatever the limit


def raise_descriptor_limit() -> None:
    """Raises the soft limit to the hard one. For a process that only serves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = reachable_limit()
    if wanted <= soft:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # macOS has a lower limit of its own
        logger.warning("the limit of %d open files cannot be raised to %d: %s", soft, wanted, error)


def reachable_limit() -> int:
    """The limit to which `raise_descriptor_limit` raises."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    known = [limit for limit in (hard, _MOST) if limit != resource.RLIM_INFINITY]
    return max(min(known), soft if soft != resource.RLIM_INFINITY else _MOST)


def current_limit() -> int:
    """Descriptors that the process may open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def room_for_connections(wanted: int | None, limit: int) -> int:
    """Connections of the HTTP port under a limit of descriptors.

    `wanted` None: three quarters of those that are free for connections, at most 16,384; the others are gRPC's. Raises
    ConfigError when `wanted` leaves too little.
    """
    most = max(1, limit - _LEAST_FREE)
    if wanted is None:
        return max(1, min(most * 3 // 4, _MOST_CONNECTIONS))
    if wanted > most:
        raise ConfigError(
            f"serve.http.max_connections is {wanted}, but this process may open {limit} files, and needs some for "
            f"itself: at most {most} connections. Raise the limit (ulimit -n, LimitNOFILE=) or ask for fewer"
        )
    return wanted


def room_for_grpc(http: int, limit: int) -> int:
    """Connections of the gRPC port beside `http` others, so that idle ones here never keep a probe out there."""
    return max(_FEWEST, min(limit - _LEAST_FREE - http, _MOST_CONNECTIONS))
