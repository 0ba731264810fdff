"""The HTTP door as `service` opens and closes it.

Owns the pairing of application and port. Refuses to keep health: probes read it from the engine when they are asked.
"""

import asyncio

from jaxserve.config_schema import ServeConfig
from jaxserve.engine import AsyncEngine
from jaxserve.serve.http import observe
from jaxserve.serve.http.app import make_app
from jaxserve.serve.http.server import HttpServer
from jaxserve.serve.tls import read_tls

_POLL_S = 0.01


class HttpDoor:
    """A `service.FrontServer`. Used on one event loop."""

    protocol = "HTTP"

    def __init__(self, engine: AsyncEngine, config: ServeConfig) -> None:
        """Raises ConfigError for keys or certificates that cannot be used."""
        assert config.http.port is not None, "no port, no service"
        tls = read_tls(config.http, "serve.http")
        views = observe.router(engine.engine, web_page=config.http.web_page, profile_dir=config.http.profile_dir)
        self._app = make_app(engine, config, (views,))
        self._server = HttpServer(
            self._app.asgi,
            host=config.host,
            port=config.http.port,
            header_timeout_s=config.http.header_timeout_s,
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
        """Closes the port. Open connections get `grace_s`, such as a probe that is to read that all is over."""
        await self._server.stop(grace_s)
