"""Handoffs of a router: it has the prompt of a request computed on one server, before another answers it.

Nothing here can lose a request: whatever fails, the server that answers computes the prompt itself.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, Self

import grpc

from jaxserve.config.schema import RouteConfig
from jaxserve.routing import PromptKey
from jaxserve.serve.gen import handoff_pb2 as handoff_pb
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.route_pool import Backend, Pool
from jaxserve.serve.status_details import is_draining

logger = logging.getLogger(__name__)

_OFFER_S = 5.0  # for a call that computes nothing
_TEXT_BYTES = 4  # of a token, about
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# Another server may do what one that says so does not.
_ELSEWHERE = (*_GONE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)


class Apart(NamedTuple):
    """When prompts are computed elsewhere, and how long that may take; the fields of `route:`."""

    prefill_above: int
    timeout_s: float
    retries: int

    @classmethod
    def of(cls, config: RouteConfig) -> Self:
        return cls(config.prefill_above, config.prefill_timeout_s, config.retries)

    def is_worth(self, request: pb.GenerateRequest) -> bool:
        """Whether the prompt is long, as far as that can be known without a tokenizer, and nothing has begun."""
        if request.HasField("resume") or request.ticket or request.sampling.HasField("prompt_logprobs"):
            return False
        if request.pictures or any(m.pictures for m in request.chat.messages):
            return False
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return len(request.token_ids.ids) > self.prefill_above
        texts = [m.content for m in request.chat.messages] if kind == "chat" else [request.text]
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) > _TEXT_BYTES * self.prefill_above

    async def prepare(
        self,
        pool: Pool,
        backend: Backend,
        request: pb.GenerateRequest,
        key: PromptKey,
        time_remaining: Callable[[], float | None],
        note_death: Callable[[Backend, str, bool], bool],
    ) -> grpc.aio.AioRpcError | None:
        """Sets room aside at `backend`, and puts a ticket into the request if a server computes its prompt.

        `time_remaining`: seconds until the deadline of the call; None: it has none. `note_death` gets each server that
        is gone while it computes the prompt, why, and whether it drains; it returns whether to try no other.
        Returns the error of `backend` when it has no room, or is gone: then no prompt was computed.
        """
        try:
            offer = handoff_pb.OfferRequest(request_id=request.request_id)
            await backend.handoff.Offer(offer, timeout=_OFFER_S, metadata=pool.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() in (*_GONE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                return error
            logger.warning("replica %s takes no handoff: %s", backend.address, error.details())
            return None
        tried: list[str] = [backend.address]
        while len(tried) <= self.retries + 1 and (source := pool.choose_prefill(key, tried)) is not None:
            tried.append(source.address)
            left_s = time_remaining()
            timeout_s = self.timeout_s if left_s is None else min(left_s, self.timeout_s)
            call = source.handoff.Prefill(
                handoff_pb.PrefillRequest(request=request), timeout=timeout_s, metadata=pool.metadata
            )
            watch = asyncio.create_task(source.parting.cancel(call))
            try:
                with pool.carrying(key, source):
                    request.ticket = (await call).ticket
                return None
            except grpc.aio.AioRpcError as error:
                logger.info("replica %s does not compute a prompt: %s", source.address, error.details())
                if error.code() in _GONE:
                    pool.suspect(source, error.details() or error.code().name)
                    if note_death(source, error.details() or error.code().name, is_draining(error)):
                        return None
                if error.code() not in _ELSEWHERE:
                    return None  # the server that answers will say what is wrong with the request
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not watch.done() or (task is not None and task.cancelling()):
                    raise
                logger.info("replica %s does not compute a prompt: it answers no more", source.address)
                if note_death(source, "it answers no more", False):
                    return None
            finally:
                watch.cancel()
                call.cancel()
        return None
