"""What operators may order a running server to do, for every door: `Orders`. Doors check their tokens.

`engine.CacheControl` has what concerns caches, `weights` other weights; the end of the server is here.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.engine import AnyEngine, CacheControl
from jaxserve.errors import InvalidRequest
from jaxserve.serve.adapters import AdapterOrders
from jaxserve.serve.shutdown import Shutdown
from jaxserve.serve.weights import WeightOrders


class Drain:
    """Shuts a server down, as SIGTERM does. Used on the server's event loop."""

    def __init__(self, engine: AnyEngine, shutdown: Shutdown, drain_s: float) -> None:
        """`drain_s`: as in `ServeConfig`."""
        self._engine = engine
        self._shutdown = shutdown
        self._drain_s = drain_s

    def begin(self, timeout_s: float | None) -> int:
        """Running requests have `timeout_s` seconds from now, None: those of the config; then they go on elsewhere.

        Returns how many there are. While the server drains already, its time can only become shorter. Raises
        InvalidRequest.
        """
        timeout_s = self._drain_s if timeout_s is None else timeout_s
        if not 0 <= timeout_s <= self._drain_s:
            raise InvalidRequest(
                f"a drain of {timeout_s:g} s is asked for, and takes 0 to {self._drain_s:g} s (serve.drain_s); "
                "give fewer seconds, or leave them out"
            )
        self._shutdown.drain_within(timeout_s)
        return self._engine.num_live


class ShownSettings(NamedTuple):
    """Settings for operators to see: the tree of the config, and those of the environment with their variables."""

    tree: Mapping[str, object]
    environment: Mapping[str, str] = {}


class Orders(NamedTuple):
    """All that operators may order, and what they may see.

    `weights` None: those of this engine stay; `adapters` None: it takes none.
    """

    cache: CacheControl
    drain: Drain
    settings: ShownSettings
    weights: WeightOrders | None = None
    adapters: AdapterOrders | None = None
