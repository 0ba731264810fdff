"""Routes for operators: LoRA adapters loaded and unloaded while the engine runs, with the names that vLLM has."""

import asyncio
from typing import Annotated

import pydantic
from fastapi import APIRouter

from jaxserve.serve.adapters import AdapterOrders
from jaxserve.serve.http.bodies import REFUSALS, JsonRoute
from jaxserve.serve.http.keys import LOAD_ADAPTER, UNLOAD_ADAPTER

_Name = Annotated[str, pydantic.Field(min_length=1, max_length=64)]
_Path = Annotated[str, pydantic.Field(min_length=1, max_length=1024)]


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class LoadAdapterBody(_Closed):
    """`lora_path`: a directory under `adapters.directory`. `load_inplace`: another adapter of this name gives way, for
    requests from now on."""

    lora_name: _Name
    lora_path: _Path
    load_inplace: bool = False


class UnloadAdapterBody(_Closed):
    lora_name: _Name


class AdapterReply(pydantic.BaseModel):
    """`digest`: of the weights, in hexadecimal; null once they are unloaded."""

    lora_name: str
    digest: str | None


def adapters_router(orders: AdapterOrders) -> APIRouter:
    routes = APIRouter(route_class=JsonRoute, responses=REFUSALS, tags=["Operators"])

    @routes.post(LOAD_ADAPTER)
    async def load(body: LoadAdapterBody) -> AdapterReply:
        """Reads an adapter; requests may name it as their model from now on."""
        info = await asyncio.to_thread(orders.load, body.lora_name, body.lora_path, replace=body.load_inplace)
        return AdapterReply(lora_name=info.name, digest=info.digest.hex())

    @routes.post(UNLOAD_ADAPTER)
    async def unload(body: UnloadAdapterBody) -> AdapterReply:
        """No request may name the adapter any more; those that run end with it."""
        orders.unload(body.lora_name)
        return AdapterReply(lora_name=body.lora_name, digest=None)

    return routes
