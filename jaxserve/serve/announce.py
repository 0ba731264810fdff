"""What a server says on stdout once a port is open, to whoever has started it. The log does not repeat it."""

import logging
from collections.abc import Callable

from jaxserve.config.schema import RuntimeConfig
from jaxserve.telemetry.logs import JsonFormatter

# What is done at a port ("serving HTTP"), its HOST:PORT, and what else there is to say.
Announce = Callable[[str, str, str], None]


def opened(what: str, address: str, more: str = "") -> str:
    """The line that people read, and programs that start a server: the address follows the last " on "."""
    return f"{what} on {address}{more}"


def announce(what: str, address: str, more: str = "") -> None:
    """Prints that line. See `announcer` for a log in JSON."""
    print(opened(what, address, more), flush=True)


def announcer(config: RuntimeConfig) -> Announce:
    """Tells of open ports on stdout, in the format of the log: whoever collects it has both streams in one."""

    def announce_in_json(what: str, address: str, more: str) -> None:
        fields = {"name": "jaxserve.serve", "levelno": logging.INFO, "levelname": "INFO", "address": address}
        print(JsonFormatter().format(logging.makeLogRecord({**fields, "msg": opened(what, address, more)})), flush=True)

    return announce_in_json if config.log_format == "json" else announce
