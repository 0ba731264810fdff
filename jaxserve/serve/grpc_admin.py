"""The methods of `jaxserve.v1.Admin`: from a message to a `CacheControl`. Tokens are checked in `grpc_access`."""

import asyncio
from collections.abc import Sequence

import grpc

from jaxserve.engine import CacheControl
from jaxserve.errors import InvalidRequest
from jaxserve.sched.base import CacheState
from jaxserve.serve.convert import refuse_unknown_fields
from jaxserve.serve.gen import admin_pb2 as pb
from jaxserve.serve.gen import admin_pb2_grpc as pb_grpc

ADMIN_NAME: str = pb.DESCRIPTOR.services_by_name["Admin"].full_name


class AdminService(pb_grpc.AdminServicer):
    """Used on one event loop. The methods raise typed errors."""

    def __init__(self, control: CacheControl) -> None:
        self._control = control

    async def Flush(self, request: pb.FlushRequest, context: grpc.aio.ServicerContext) -> pb.FlushResponse:
        """Forgets pages in every tier."""
        refuse_unknown_fields(request)
        if request.all == bool(request.cache_salts):
            raise InvalidRequest("give cache_salts, or all = true, one of the two")
        salts = None if request.all else list(request.cache_salts)
        forgotten = await asyncio.to_thread(self._control.flush, salts)
        return pb.FlushResponse(**forgotten._asdict())

    async def ResizePool(self, request: pb.ResizePoolRequest, context: grpc.aio.ServicerContext) -> pb.CacheResponse:
        """Pages that are given out."""
        refuse_unknown_fields(request)
        return _response(await asyncio.to_thread(self._control.resize, request.num_pages, preempt=request.preempt))

    async def SetTiers(self, request: pb.SetTiersRequest, context: grpc.aio.ServicerContext) -> pb.CacheResponse:
        """Host memory and store, off and on."""
        refuse_unknown_fields(request)
        host = request.host if request.HasField("host") else None
        store = request.store if request.HasField("store") else None
        return _response(await asyncio.to_thread(self._control.use_tiers, host=host, store=store))

    async def GetCache(self, request: pb.GetCacheRequest, context: grpc.aio.ServicerContext) -> pb.CacheResponse:
        """The state of each replica."""
        refuse_unknown_fields(request)
        return _response(await asyncio.to_thread(self._control.states))


def _response(states: Sequence[CacheState]) -> pb.CacheResponse:
    return pb.CacheResponse(replicas=[pb.CacheState(**state._asdict()) for state in states])
