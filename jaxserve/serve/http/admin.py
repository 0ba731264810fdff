"""Routes for operators: caches of the running engine, see `CacheControl`, and the end of the server, see `Drain`.

They exist only with `serve.admin_tokens_file`. The application checks the tokens, before a body is read.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import pydantic
from fastapi import APIRouter

from jaxserve.engine.cache_control import MAX_SALTS
from jaxserve.errors import InvalidRequest
from jaxserve.sched.base import CacheState
from jaxserve.serve.http.bodies import REFUSALS, JsonRoute
from jaxserve.serve.http.keys import ADMIN_FOLDER
from jaxserve.serve.http.requests import InRange
from jaxserve.serve.http.whole_numbers import WholeNumbers
from jaxserve.serve.orders import Orders


class _Body(WholeNumbers):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class FlushBody(_Body):
    """Whose pages are forgotten: those of requests with these cache salts, "" for those without one; or all."""

    cache_salts: Annotated[list[str], pydantic.Field(min_length=1, max_length=MAX_SALTS)] | None = None
    all: bool = False


class PoolBody(_Body):
    """`num_pages` of each replica; `preempt`: take them from sequences now, rather than wait for the ends of those."""

    num_pages: Annotated[int, pydantic.Field(ge=1, le=2**63 - 1)]
    preempt: bool = False


class TiersBody(_Body):
    """What is left out or null stays as it is."""

    host: bool | None = None
    store: bool | None = None


class DrainBody(_Body):
    """`timeout_s`: seconds that running requests get, at most `serve.drain_s`, which is the default."""

    timeout_s: Annotated[float, InRange(0)] | None = None


class DrainReply(pydantic.BaseModel):
    """`num_live`: requests that have not ended."""

    num_live: int


class FlushReply(pydantic.BaseModel):
    """Pages of the device and slots of host memory that were forgotten; pages of a store are not counted."""

    pages: int
    slots: int


class ReplicaCache(pydantic.BaseModel):
    """`pages` of the device, of which `grantable` may be held and `held` are. `host`, `store`: on; null: none there.
    `rung`: of the ladder of degradation."""

    pages: int
    grantable: int
    held: int
    host: bool | None
    store: bool | None
    rung: str


class CacheReply(pydantic.BaseModel):
    replicas: list[ReplicaCache]


def admin_router(orders: Orders) -> APIRouter:
    control = orders.cache
    routes = APIRouter(prefix=ADMIN_FOLDER.rstrip("/"), route_class=JsonRoute, responses=REFUSALS, tags=["Operators"])

    @routes.get("/cache")
    async def cache() -> CacheReply:
        """The caches of all replicas that live."""
        return _reply(await asyncio.to_thread(control.states))

    @routes.post("/flush")
    async def flush(body: FlushBody) -> FlushReply:
        """Forgets pages in every tier. Afterwards none is found that was computed before."""
        if body.all == (body.cache_salts is not None):
            raise InvalidRequest("give cache_salts, or all as true, one of the two")
        return FlushReply(**(await asyncio.to_thread(control.flush, body.cache_salts))._asdict())

    @routes.post("/pool")
    async def pool(body: PoolBody) -> CacheReply:
        """Makes the page pool of the device smaller or larger again."""
        return _reply(await asyncio.to_thread(control.resize, body.num_pages, preempt=body.preempt))

    @routes.post("/tiers")
    async def tiers(body: TiersBody) -> CacheReply:
        """Switches host memory and the store off and on."""
        return _reply(await asyncio.to_thread(control.use_tiers, host=body.host, store=body.store))

    @routes.post("/drain")
    async def drain(body: DrainBody) -> DrainReply:
        """Shuts the server down, as SIGTERM does: requests that have not ended in time go on at another server."""
        return DrainReply(num_live=orders.drain.begin(body.timeout_s))

    return routes


def _reply(states: Sequence[CacheState]) -> CacheReply:
    return CacheReply(replicas=[ReplicaCache(**state._asdict()) for state in states])
