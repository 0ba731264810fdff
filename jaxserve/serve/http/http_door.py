"""The HTTP door as `service` opens and closes it: the pair of application and port.

Health is not kept here: probes read it from the engine when they are asked.
"""

import asyncio

from jaxserve.config.schema import ServeConfig
from jaxserve.engine import AsyncEngine, CacheControl
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.descriptors import current_limit, room_for_connections
from jaxserve.serve.http import observe
from jaxserve.serve.http.admin import admin_router
from jaxserve.serve.http.app import make_app
from jaxserve.serve.http.server import HttpServer
from jaxserve.serve.keys import KnownKeys
from jaxserve.serve.ports import HeldPort
from jaxserve.serve.tls import read_tls

_POLL_S = 0.01


class HttpDoor:
    """A `service.FrontServer`. Used on one event loop."""

    protocol = "HTTP"

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServeConfig,
        counts: DoorCounts,
        port: HeldPort | None = None,
        *,
        control: CacheControl | None = None,
        admins: KnownKeys | None = None,
    ) -> None:
        """`port` None: it is taken at the start. `control` is for those with a token of `admins`.

        Raises ConfigError for keys, certificates or limits that cannot be used.
        """
        assert config.http.port is not None, "no port, no service"
        tls = read_tls(config.http, "serve.http")
        views = observe.router(
            engine.engine, counts, web_page=config.http.web_page, profile_dir=config.http.profile_dir
        )
        more = (views,) if control is None else (views, admin_router(control))
        self._app = make_app(engine, config, counts, more, admins)
        self._server = HttpServer(
            self._app.asgi,
            host=config.host,
            port=config.http.port if port is None else port,
            header_timeout_s=config.http.header_timeout_s,
            max_connections=room_for_connections(config.http.max_connections, current_limit()),
            counts=counts,
            tls=None if tls is None else tls.context,
        )

    async def start(self) -> int:
        """Listens; returns the port. Raises ConfigError."""
        return await self._server.start()

    async def report(self, healthy: bool) -> None:
        """Nothing to do: see the head of this file."""

    async def report_live(self, live: bool) -> None:
        """The same."""

    async def report_not_serving(self) -> None:
        """The same."""

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until every POST has been answered."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._app.guard.num_live:
            if asyncio.get_running_loop().time() >= deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def stop(self, grace_s: float) -> None:
        """Closes the port. Open connections get `grace_s`, such as a probe that should read the end of the service."""
        await self._server.stop(grace_s)
