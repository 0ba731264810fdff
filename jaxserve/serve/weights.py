"""`WeightOrders`: other weights for a running server, from directories that an operator names, and its sleep.

`assemble.live_weights` carries the orders out. The limit is here: checkpoints are read from one configured directory,
whatever a caller names, so that a token for this server opens no other file of its machine.
"""

import logging
from pathlib import Path
from typing import Protocol

from jaxserve.errors import ConfigError, InvalidRequest

logger = logging.getLogger(__name__)

WEIGHTS_DIR = "serve.http.weights_dir"


class ChangesWeights(Protocol):
    """`assemble.live_weights.LiveWeights`, as far as orders need it. Methods wait, and raise typed errors.

    Attributes:
      version: of the weights; empty: those of the start.
      asleep: the device has been given back.
    """

    version: str

    @property
    def asleep(self) -> bool: ...

    def update(self, source: str, version: str, policy: str) -> float:
        """Gives the engine the checkpoint in the directory `source`. Returns the pause of its loop in seconds."""
        ...

    def sleep(self, *, keep_weights: bool) -> None:
        """Gives the device back once the running requests have ended."""
        ...

    def wake_up(self, source: str | None, version: str) -> None:
        """Takes the device again. `source` None: with the weights that were kept."""
        ...


class WeightOrders:
    """Used by any thread that may wait."""

    def __init__(self, weights: ChangesWeights, directory: str | None) -> None:
        """`directory`: that of all checkpoints that may be named; None: there are none. Raises ConfigError."""
        self._weights = weights
        self._root = None if directory is None else CheckpointRoot(directory, WEIGHTS_DIR)

    @property
    def version(self) -> str:
        """Of the weights; empty: those of the start."""
        return self._weights.version

    @property
    def asleep(self) -> bool:
        """The device is given back, or will be when the running requests have ended."""
        return self._weights.asleep

    def update(self, name: str, version: str, policy: str) -> float:
        """Gives the engine the checkpoint in the directory `name` below the configured one.

        Returns the seconds for which the loop paused. Raises InvalidRequest for a name outside of it, and what
        `LiveWeights.update` raises; nothing has changed then.
        """
        pause_s = self._weights.update(self._find(name), version, policy)
        logger.info("weights %r from %s: the loop paused for %.1f ms", version, name, 1000 * pause_s)
        return pause_s

    def sleep(self, *, keep_weights: bool) -> None:
        """See `LiveWeights.sleep`."""
        self._weights.sleep(keep_weights=keep_weights)
        logger.info("asleep, the weights %s", "are in the memory of the host" if keep_weights else "are dropped")

    def wake_up(self, name: str | None, version: str) -> None:
        """With the checkpoint in the directory `name`; None: with the weights that were kept. Raises as `update`."""
        self._weights.wake_up(None if name is None else self._find(name), version)
        logger.info("awake, with weights %r", self.version)

    def _find(self, name: str) -> str:
        if self._root is None:
            raise InvalidRequest(
                "this server reads no other checkpoints; set serve.http.weights_dir to their directory"
            )
        return self._root.find(name)


class CheckpointRoot:
    """The one directory below which callers may name directories."""

    def __init__(self, directory: str, setting: str) -> None:
        """`setting`: that of the directory, for messages. Raises ConfigError for what is no directory."""
        self._setting = setting
        self._root = Path(directory).resolve()
        if not self._root.is_dir():
            raise ConfigError(f"{setting}: {directory!r} is no directory; name the one of the checkpoints")

    def find(self, name: str) -> str:
        """The path of a directory. A name that leads out of the root, by `..` or through a link, is refused, and so
        is a directory with a file that does: InvalidRequest."""
        shown = f"directory {name!r:.200}"
        try:
            path = (self._root / name).resolve()
            if not path.is_relative_to(self._root):
                raise InvalidRequest(f"{shown} is not under {self._setting}; name one that is")
            if not path.is_dir():
                raise InvalidRequest(f"{shown} is no directory under {self._setting}")
            for file in path.rglob("*"):
                if not file.resolve().is_relative_to(self._root):
                    raise InvalidRequest(f"{shown} has a link that leads out of {self._setting}: {file.name!r:.200}")
        except (OSError, ValueError) as error:  # also a name with a zero in it
            raise InvalidRequest(f"{shown} cannot be read: {error}") from error
        return str(path)
