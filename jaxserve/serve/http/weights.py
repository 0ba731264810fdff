"""Routes for operators: other weights for the running engine, and its sleep, see `WeightOrders`.

`/sleep`, `/wake_up` and `/is_sleeping` have the names and the levels that trainers know of vLLM.
"""

import asyncio
from typing import Annotated, Literal

import pydantic
from fastapi import APIRouter, Query

from jaxserve.errors import InvalidRequest
from jaxserve.serve.http.bodies import REFUSALS, JsonRoute
from jaxserve.serve.http.keys import ADMIN_FOLDER, IS_SLEEPING, SLEEP, WAKE_UP
from jaxserve.serve.weights import WeightOrders

_Name = Annotated[str, pydantic.Field(min_length=1, max_length=1024)]
_Version = Annotated[str, pydantic.Field(min_length=1, max_length=256)]


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class WeightsBody(_Closed):
    """`directory` of a checkpoint under `serve.http.weights_dir`; `version`, which answers tell; `policy` of requests
    that run."""

    directory: _Name
    version: _Version
    policy: Literal["recompute", "finish", "keep"] = "recompute"


class WakeUpBody(_Closed):
    """Other weights, as in `WeightsBody`; both or none."""

    directory: _Name | None = None
    version: _Version | None = None


class SleepQuery(_Closed):
    """`level` 1: the weights wait in the memory of the host; 2: they are dropped."""

    level: Annotated[int, pydantic.Field(ge=1, le=2)] = 1


class NoQuery(_Closed):
    """Nothing: the device is taken whole."""


class WeightsReply(pydantic.BaseModel):
    """`version` of the weights, empty for those of the start."""

    version: str
    asleep: bool


class UpdatedReply(pydantic.BaseModel):
    """`pause_s`: seconds for which the loop stood still, the longest of all replicas."""

    version: str
    pause_s: float


class SleepingReply(pydantic.BaseModel):
    is_sleeping: bool


def weights_routers(orders: WeightOrders) -> tuple[APIRouter, APIRouter]:
    """Two, since the calls that vLLM has need no body."""
    return _update_router(orders), _sleep_router(orders)


def _update_router(orders: WeightOrders) -> APIRouter:
    routes = APIRouter(prefix=ADMIN_FOLDER.rstrip("/"), route_class=JsonRoute, responses=REFUSALS, tags=["Operators"])

    @routes.get("/weights")
    async def weights() -> WeightsReply:
        """The version of the weights."""
        return WeightsReply(version=orders.version, asleep=orders.asleep)

    @routes.post("/weights")
    async def update(body: WeightsBody) -> UpdatedReply:
        """Reads other weights, and gives them to the engine between two steps."""
        pause_s = await asyncio.to_thread(orders.update, body.directory, body.version, body.policy)
        return UpdatedReply(version=body.version, pause_s=pause_s)

    return routes


def _sleep_router(orders: WeightOrders) -> APIRouter:
    routes = APIRouter(responses=REFUSALS, tags=["Operators"])

    @routes.post(SLEEP)
    async def sleep(query: Annotated[SleepQuery, Query()]) -> WeightsReply:
        """Gives back the memory of the device, once the running requests have ended; new ones are refused."""
        await asyncio.to_thread(orders.sleep, keep_weights=query.level == 1)
        return WeightsReply(version=orders.version, asleep=orders.asleep)

    @routes.post(WAKE_UP)
    async def wake_up(query: Annotated[NoQuery, Query()], body: WakeUpBody | None = None) -> WeightsReply:
        """Takes the device again, with the weights that were kept or with others."""
        directory, version = (None, None) if body is None else (body.directory, body.version)
        if (directory is None) != (version is None):
            raise InvalidRequest("give directory and version, or neither to wake up with the weights that were kept")
        await asyncio.to_thread(orders.wake_up, directory, version or "")
        return WeightsReply(version=orders.version, asleep=orders.asleep)

    @routes.get(IS_SLEEPING)
    async def is_sleeping() -> SleepingReply:
        """Whether the device is given back."""
        return SleepingReply(is_sleeping=orders.asleep)

    return routes
