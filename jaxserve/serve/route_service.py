"""`jaxserve.v1.Inference` answered by replicas: one call in, one call out, and a second one when a replica dies.

Owns what happens to one call. Refuses to know which replicas there are (`route_pool`) and statuses of its own
(`grpc_errors`). A call moves to another replica only while its client has seen nothing: from then on half of an answer
has been told, and only the client knows whether it may be told again.
"""

import asyncio
import uuid
from typing import NoReturn

import grpc

from jaxserve.errors import EngineStopped, InvalidRequest, QueueFull
from jaxserve.routing import PromptKey, key_of_text, key_of_tokens
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.route_pool import Backend, Pool

# A server that vanishes, or that cancels its calls when it goes.
_DEATHS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class RouteService(pb_grpc.InferenceServicer):
    """The methods. Used on one event loop, which alone mutates it."""

    def __init__(self, pool: Pool, *, retries: int) -> None:
        """`retries`: times that a call may move from a replica that died."""
        self._pool = pool
        self._retries = retries
        self._live: dict[str, _Forward] = {}
        self._accepting = True

    @property
    def num_live(self) -> int:
        """Calls that have not ended."""
        return len(self._live)

    def refuse_new(self) -> None:
        """From now on every new call ends with UNAVAILABLE."""
        self._accepting = False

    def end_all(self) -> None:
        """Ends every call with UNAVAILABLE and the number of tokens that were streamed."""
        for forward in self._live.values():
            forward.end()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Forwards one request. Raises typed errors; a cancel from whatever cause is passed on to the replica."""
        if not self._accepting:
            raise EngineStopped("the router takes no more requests: it is shutting down")
        # One id for all attempts; and a replica could not know that the same id is live on another.
        request.request_id = request.request_id or uuid.uuid4().hex
        if request.request_id in self._live:
            raise InvalidRequest(f"a request with id {request.request_id!r} is live already; choose another")
        forward = _Forward(self._pool, request, context, self._retries)
        self._live[request.request_id] = forward
        try:
            await forward.run()
        finally:
            del self._live[request.request_id]


class _Forward:
    """One call on its way. Mutated by its handler; `end` may be called from elsewhere on the event loop."""

    def __init__(
        self, pool: Pool, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, retries: int
    ) -> None:
        self._pool = pool
        self._request = request
        self._context = context
        self._retries = retries
        self._key = key_of_request(request) if pool.uses_prompt else ()
        self._call: grpc.aio.UnaryStreamCall | None = None
        self._num_replies = 0
        self._num_tokens = 0
        self._ending = False

    def end(self) -> None:
        self._ending = True
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        tried: list[str] = []
        deaths: list[str] = []
        full: list[str] = []
        while True:
            backend = self._pool.choose(self._key, tried)
            if backend is None or len(deaths) > self._retries or len(full) > 1:
                self._give_up(tried, deaths, full)
            tried.append(backend.address)
            with self._pool.carrying(self._key, backend):
                failure = await self._attempt(backend)
            if failure is None:
                return
            code, text = failure
            if code in _DEATHS:
                self._pool.suspect(backend, text)
                deaths.append(f"{backend.address}: {text}")
                if self._num_replies:
                    raise EngineStopped(
                        f"replica {backend.address} has died after {self._num_tokens} tokens had been streamed; send "
                        f"the request again: {text}"
                    )
            elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and not self._num_replies:
                full.append(text)
            else:
                await self._context.abort(code, text)

    def _give_up(self, tried: list[str], deaths: list[str], full: list[str]) -> NoReturn:
        """Raises what the client is told when no attempt is left."""
        if full:  # one with room may have died, but to come again later is the better advice
            raise QueueFull(full[-1])
        if len(deaths) > self._retries:
            raise EngineStopped(
                f"{len(deaths)} replicas have died with this request before they answered, and no more are tried "
                f"(route.retries is {self._retries}): {'; '.join(deaths)}"
            )
        rest = self._pool.describe(tried)
        if not deaths:
            raise EngineStopped(f"no replica is well: {rest}")
        raise EngineStopped(
            f"the replica with this request has died before it answered ({'; '.join(deaths)}), and there is no other"
            + (f" that is well: {rest}" if rest else "")
        )

    async def _attempt(self, backend: Backend) -> tuple[grpc.StatusCode, str] | None:
        """None when the call has ended well, else its status and text."""
        if self._ending:
            raise EngineStopped("the router is shutting down; nothing had been streamed")
        # None where the client set no deadline, whatever the signature says.
        call = self._call = backend.stub.Generate(self._request, timeout=self._context.time_remaining())
        try:
            async for reply in call:
                if not self._num_replies and _is_cut_off(reply):
                    return grpc.StatusCode.UNAVAILABLE, "it was shut down before it began with the request"
                self._num_replies += 1
                self._num_tokens += len(reply.token_ids)
                await self._context.write(reply)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        except asyncio.CancelledError:
            if not self._ending:
                raise
            raise EngineStopped(f"the router is shutting down; {self._num_tokens} tokens had been streamed") from None
        finally:
            call.cancel()
        return None


def _is_cut_off(reply: pb.GenerateResponse) -> bool:
    """What a server sends for a request that had not begun when its time to drain was over."""
    return reply.finish_reason == pb.FINISH_REASON_ABORT and not reply.token_ids


def key_of_request(request: pb.GenerateRequest) -> PromptKey:
    """The key of the prompt as it came: text stays text, since only a replica has the tokenizer."""
    salt, tenant = request.cache_salt, request.tenant
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return key_of_tokens(request.token_ids.ids, cache_salt=salt, tenant=tenant)
    text = request.text
    if kind == "chat":
        text = "".join(f"\x02{m.role}\x03{m.content}" for m in request.chat.messages)
    return key_of_text(text, cache_salt=salt, tenant=tenant)
