"""What tells of open ports, in the format of the log."""

import logging

from jaxserve.config.schema import RuntimeConfig
from jaxserve.serve.announce import Announce, announce, opened
from jaxserve.telemetry.logs import JsonFormatter


def announcer(config: RuntimeConfig) -> Announce:
    """Tells of open ports on stdout, in the format of the log: whoever collects it has both streams in one."""

    def announce_in_json(what: str, address: str, more: str) -> None:
        fields = {"name": "jaxserve.serve", "levelno": logging.INFO, "levelname": "INFO", "address": address}
        print(JsonFormatter().format(logging.makeLogRecord({**fields, "msg": opened(what, address, more)})), flush=True)

    return announce_in_json if config.log_format == "json" else announce
