"""`AdapterOrders`: LoRA adapters loaded into a running server, from directories that an operator names.

The limit is here: adapters are read from one configured directory, whatever a caller names, so that a token for this
server opens no other file of its machine.
"""

from jaxserve.engine import AnyEngine
from jaxserve.engine.adapters import AdapterInfo, LoadedAdapters
from jaxserve.errors import InvalidRequest
from jaxserve.serve.weights import CheckpointRoot


class AdapterOrders:
    """Used by any thread that may wait."""

    def __init__(self, engine: AnyEngine, directory: str | None) -> None:
        """`directory`: that of all adapters that may be named; None: there are none. Raises ConfigError."""
        self._engine = engine
        self._root = None if directory is None else CheckpointRoot(directory, "adapters.directory")

    def load(self, name: str, path: str, *, replace: bool) -> AdapterInfo:
        """Reads the adapter in the directory `path` below the configured one.

        Raises InvalidRequest for a path outside, and what `LoadedAdapters.load` raises; nothing has changed then.
        """
        loaded = self._loaded
        if self._root is None:
            raise InvalidRequest(
                "this server loads no adapters while it runs; set adapters.directory to their directory"
            )
        return loaded.load(name, self._root.find(path), self._engine.model.name, replace=replace)

    def unload(self, name: str) -> None:
        """See `LoadedAdapters.unload`."""
        self._loaded.unload(name, self._engine.model.name)

    def all(self) -> list[tuple[AdapterInfo, bool]]:
        """The adapters in the order in which they were loaded, and of each whether its weights are in memory."""
        loaded = self._loaded
        kept = loaded.kept
        return [(info, info.name in kept) for info in loaded.all]

    @property
    def _loaded(self) -> LoadedAdapters:
        loaded = self._engine.model.adapters
        if loaded is None:
            raise InvalidRequest("this server takes no LoRA adapters; start it with adapters.slots of 1 or more")
        return loaded
