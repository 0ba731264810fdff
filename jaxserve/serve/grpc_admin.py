"""The methods of `jaxserve.v1.Admin` and, of a router, `RouterAdmin`: from a message to an order.

Tokens are checked in `grpc_access`.
"""

import asyncio
from collections.abc import Sequence

import grpc

from jaxserve.engine.adapters import AdapterInfo
from jaxserve.errors import InvalidRequest
from jaxserve.sched.base import CacheState
from jaxserve.serve.adapters import AdapterOrders
from jaxserve.serve.convert import refuse_unknown_fields
from jaxserve.serve.gen import admin_pb2 as pb
from jaxserve.serve.gen import admin_pb2_grpc as pb_grpc
from jaxserve.serve.orders import Orders
from jaxserve.serve.quarantine import LISTED, MAX_QUARANTINED, Quarantine, not_quarantined

# Of a server, and of a router.
ADMIN_NAMES: tuple[str, ...] = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())


class AdminService(pb_grpc.AdminServicer):
    """Used on one event loop. The methods raise typed errors."""

    def __init__(self, orders: Orders) -> None:
        self._control = orders.cache
        self._drain = orders.drain
        self._adapters = orders.adapters

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

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        """The end of the server."""
        refuse_unknown_fields(request)
        return pb.DrainResponse(
            num_live=self._drain.begin(request.timeout_s if request.HasField("timeout_s") else None)
        )

    async def GetCache(self, request: pb.GetCacheRequest, context: grpc.aio.ServicerContext) -> pb.CacheResponse:
        """The state of each replica."""
        refuse_unknown_fields(request)
        return _response(await asyncio.to_thread(self._control.states))

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext) -> pb.AdapterInfo:
        """Requests may name the adapter from now on."""
        refuse_unknown_fields(request)
        load = self._need_adapters().load
        return _adapter(await asyncio.to_thread(load, request.name, request.path, replace=request.replace), True)

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        """No request may name the adapter any more."""
        refuse_unknown_fields(request)
        self._need_adapters().unload(request.name)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAdaptersResponse:
        """All that requests may name."""
        refuse_unknown_fields(request)
        return pb.ListAdaptersResponse(adapters=[_adapter(*one) for one in self._need_adapters().all()])

    def _need_adapters(self) -> AdapterOrders:
        if self._adapters is None:
            raise InvalidRequest("this server takes no LoRA adapters; start it with adapters.slots of 1 or more")
        return self._adapters


def _adapter(info: AdapterInfo, in_memory: bool) -> pb.AdapterInfo:
    return pb.AdapterInfo(**info._asdict(), in_memory=in_memory)


class RouterAdminService(pb_grpc.RouterAdminServicer):
    """The methods of `jaxserve.v1.RouterAdmin`. Used on one event loop; raises typed errors."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine

    async def ListQuarantined(
        self, request: pb.ListQuarantinedRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListQuarantinedResponse:
        """Contents that are refused."""
        refuse_unknown_fields(request)
        limit = request.limit if request.HasField("limit") else LISTED
        if not 1 <= limit <= MAX_QUARANTINED:
            raise InvalidRequest(f"limit is {limit}, but must be from 1 to {MAX_QUARANTINED}")
        entries = [pb.QuarantinedContent(**entry._asdict()) for entry in self._quarantine.listed(limit)]
        return pb.ListQuarantinedResponse(entries=entries, total=len(self._quarantine))

    async def RemoveQuarantined(
        self, request: pb.RemoveQuarantinedRequest, context: grpc.aio.ServicerContext
    ) -> pb.RemoveQuarantinedResponse:
        """Takes requests of one content again."""
        refuse_unknown_fields(request)
        if not self._quarantine.remove(request.digest):
            raise InvalidRequest(not_quarantined(request.digest))
        return pb.RemoveQuarantinedResponse()


def _response(states: Sequence[CacheState]) -> pb.CacheResponse:
    return pb.CacheResponse(replicas=[pb.CacheState(**state._asdict()) for state in states])
