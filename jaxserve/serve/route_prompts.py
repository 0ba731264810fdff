"""How a router asks the servers of a handoff, over gRPC: for room where a request is answered, and for its prompt."""

import asyncio
import logging
from collections.abc import Sequence

import grpc

from jaxserve.routing import PromptKey
from jaxserve.serve.gen import handoff_pb2 as handoff_pb
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.route_apart import Missed
from jaxserve.serve.route_pool import Backend, Pool
from jaxserve.serve.status_details import is_draining

logger = logging.getLogger(__name__)

_OFFER_S = 5.0  # for a call that computes nothing
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# Another server may do what one that says so does not.
_ELSEWHERE = (*_GONE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)


class PoolPrompts:
    """The `PromptServers` of a pool."""

    def __init__(self, pool: Pool, metadata: tuple[tuple[str, str], ...]) -> None:
        """`metadata`: of the calls of one request."""
        self._pool = pool
        self._metadata = metadata

    async def offer(self, backend: Backend, request_id: str) -> bool:
        """Sets room aside at the server that is to answer. False: it takes no handoffs.

        Raises AioRpcError when it has no room, or is gone.
        """
        offer = handoff_pb.OfferRequest(request_id=request_id)
        try:
            await backend.handoff.Offer(offer, timeout=_OFFER_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() in (*_GONE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise
            logger.warning("replica %s takes no handoff: %s", backend.address, error.details())
            return False
        return True

    async def compute(
        self, request: pb.GenerateRequest, key: PromptKey, tried: Sequence[str], timeout_s: float
    ) -> bytes | Missed | None:
        """See `PromptServers`."""
        source = self._pool.choose_prefill(key, tried)
        if source is None:
            return None
        asked = handoff_pb.PrefillRequest(request=request)
        call = source.handoff.Prefill(asked, timeout=timeout_s, metadata=self._metadata)
        watch = asyncio.create_task(source.parting.cancel(call))
        try:
            with self._pool.carrying(key, source):
                return (await call).ticket
        except grpc.aio.AioRpcError as error:
            reason, gone = error.details() or error.code().name, error.code() in _GONE
            if gone:
                self._pool.suspect(source, reason)
            return Missed(source.address, reason, gone, is_draining(error), error.code() in _ELSEWHERE)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not watch.done() or (task is not None and task.cancelling()):
                raise
            return Missed(source.address, "it answers no more", gone=True, drained=False, elsewhere=True)
        finally:
            watch.cancel()
            call.cancel()
