"""`KeyFiles`: who may call a server, as its files say; they are read at the start, and again after SIGHUP.

Doors keep the objects of this module and not what was in a file, so that all of them change at once. What a call
needs is decided when it begins: calls that run go on when their key is taken away.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.config.schema import ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.keys import KnownKeys, ListedKey, read_keys, read_listed_keys
from jaxserve.serve.owners import Owners
from jaxserve.serve.shutdown import Shutdown

logger = logging.getLogger(__name__)

API_KEYS, TOKENS = "serve.http.api_keys_file", "serve.grpc.tokens_file"
ADMIN_TOKENS = "serve.admin_tokens_file"


class _Read(NamedTuple):
    """What the files hold; None: there is no such file."""

    grpc: tuple[ListedKey, ...] | None
    http: tuple[ListedKey, ...] | None
    admins: tuple[str, ...] | None


class KeyFiles:
    """Used on one event loop.

    Attributes:
      grpc, http: the callers of each port.
      admins: the tokens of operators; None: there is nothing for them.
    """

    def __init__(self, config: ServeConfig) -> None:
        """Reads the files. Raises ConfigError."""
        self._config = config
        self._last = self._read()
        self.grpc = Owners(self._last.grpc, salt_by_key=config.salt_by_key)
        self.http = Owners(self._last.http, salt_by_key=config.salt_by_key)
        self.admins = None if self._last.admins is None else KnownKeys(self._last.admins)

    async def follow(self, shutdown: Shutdown) -> None:
        """Reads the files again whenever SIGHUP asks for it, until it is cancelled. Files that cannot be used change
        nothing: all keys stay as they are, and the log has the reason."""
        while True:
            await shutdown.reread.wait()
            shutdown.reread.clear()
            try:
                read = await asyncio.to_thread(self._read)
            except ConfigError as error:
                logger.error("the keys stay as they are, since their files cannot be used: %s", error)
            else:
                self._take(read)

    def _read(self) -> _Read:
        grpc, http, admins = self._config.grpc, self._config.http, self._config.admin_tokens_file
        return _Read(
            None if grpc.port is None else _read_listed(grpc.tokens_file, TOKENS),
            None if http.port is None else _read_listed(http.api_keys_file, API_KEYS),
            None if admins is None else read_keys(admins, ADMIN_TOKENS),
        )

    def _take(self, read: _Read) -> None:
        """Everywhere at once: nothing runs between these lines."""
        changes: list[str] = []
        for setting, before, now in (
            (TOKENS, self._last.grpc, read.grpc),
            (API_KEYS, self._last.http, read.http),
            (ADMIN_TOKENS, self._last.admins, read.admins),
        ):
            if before is not None and now is not None:
                was, has = _secrets(before), _secrets(now)
                changes.append(f"{setting} has {len(has)}, {len(has - was)} of them new; {len(was - has)} have gone")
        if read.grpc is not None:
            self.grpc.replace(read.grpc)
        if read.http is not None:
            self.http.replace(read.http)
        if self.admins is not None and read.admins is not None:
            self.admins.replace(read.admins)
        self._last = read
        logger.info("the keys were read again: %s", "; ".join(changes))


def has_key_files(config: ServeConfig) -> bool:
    """Whether SIGHUP has something to read again."""
    files = config.grpc.tokens_file, config.http.api_keys_file, config.admin_tokens_file
    return any(path is not None for path in files)


def _read_listed(path: str | None, setting: str) -> tuple[ListedKey, ...] | None:
    return None if path is None else read_listed_keys(path, setting)


def _secrets(keys: Iterable[ListedKey | str]) -> set[str]:
    return {key.secret if isinstance(key, ListedKey) else key for key in keys}
