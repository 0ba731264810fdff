"""The HTTP door as `service` opens and closes it: the pair of application and port.

Health is not kept here: probes read it from the engine when they are asked.
"""

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter

from jaxserve.config.schema import ServeConfig
from jaxserve.engine import AnyEngine, AsyncEngine
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.descriptors import current_limit, room_for_connections
from jaxserve.serve.http import observe
from jaxserve.serve.http.adapters import adapters_router
from jaxserve.serve.http.admin import admin_router
from jaxserve.serve.http.app import make_app
from jaxserve.serve.http.profile import ProfileCapture
from jaxserve.serve.http.server import HttpServer
from jaxserve.serve.http.vllm_admin import vllm_admin_router
from jaxserve.serve.http.weights import weights_routers
from jaxserve.serve.key_files import KeyFiles
from jaxserve.serve.orders import Orders
from jaxserve.serve.ports import HTTP, HeldPort
from jaxserve.serve.tls import Certificates

if TYPE_CHECKING:
    from jaxserve.serve.http.batches import BatchRunner

_POLL_S = 0.01


class HttpDoor:
    """A `service.FrontServer`. Used on one event loop."""

    protocol = HTTP

    def __init__(
        self,
        engine: AsyncEngine[AnyEngine],
        config: ServeConfig,
        counts: DoorCounts,
        keys: KeyFiles,
        port: HeldPort | None = None,
        *,
        orders: Orders | None = None,
    ) -> None:
        """`port` None: it is taken at the start. `orders` are for operators.

        Raises ConfigError for certificates, limits or a directory that cannot be used.
        """
        assert config.http.port is not None, "no port, no service"
        certificates = Certificates.of(config.http, "serve.http")
        self._keys = keys
        profiles = ProfileCapture(config.http.profile_dir)
        more: tuple[APIRouter, ...] = (observe.router(engine.engine, counts, config.http),)
        if orders is not None:
            more += (admin_router(orders), vllm_admin_router(engine.engine, orders, profiles))
            more += (observe.profile_router(profiles),)
            if orders.weights is not None:
                more += weights_routers(orders.weights)
            if orders.adapters is not None:
                more += (adapters_router(orders.adapters),)
        self._batches: "BatchRunner | None" = None
        if config.http.batch_dir is not None:
            from jaxserve.serve.http.batches import BatchRunner, BatchStore, batches_routers  # bodies of their own

            store = BatchStore(config.http.batch_dir, config.http.batch_dir_bytes, config.http.batch_ended)
            self._batches = BatchRunner(
                store, config.http.batch_lines, config.http.max_body_bytes, config.http.max_json_parts
            )
            more += batches_routers(store, self._batches)
        self._app = make_app(engine, config, counts, keys, more)
        self._server = HttpServer(
            self._app.asgi,
            host=config.host,
            port=config.http.port if port is None else port,
            header_timeout_s=config.http.header_timeout_s,
            max_connections=room_for_connections(config.http.max_connections, current_limit()),
            counts=counts,
            tls=None if certificates is None else certificates.context(),
        )

    async def start(self) -> int:
        """Listens; returns the port. Raises ConfigError."""
        port = await self._server.start()
        if self._batches is not None:
            self._batches.start(self._app.api, self._keys.http)
        return port

    async def report(self, healthy: bool) -> None:
        """Nothing to do: see the head of this file."""

    async def report_live(self, live: bool) -> None:
        """The same."""

    async def report_not_serving(self) -> None:
        """No further line of a batch is begun. For the rest see the head of this file."""
        if self._batches is not None:
            self._batches.hold()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until every POST has been answered, and every line of a batch that was begun."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._app.guard.num_live or (self._batches is not None and self._batches.num_running):
            if asyncio.get_running_loop().time() >= deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def stop(self, grace_s: float) -> None:
        """Closes the port. Open connections get `grace_s`, such as a probe that should read the end of the service."""
        if self._batches is not None:
            await self._batches.stop()
        await self._server.stop(grace_s)
