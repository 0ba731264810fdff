"""`jaxserve.v1.Inference` answered by replicas: one call in, one call out, and another one when a replica dies.

Replicas are known to `route_pool`; errors become statuses in `grpc_errors`. A call that has been answered in part goes
on at another replica behind what the client has (`received`), so that the client cannot tell.
"""

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.message import Message

from jaxserve.api import ResumeReason
from jaxserve.errors import EngineStopped, InvalidRequest, QueueFull
from jaxserve.routing import PromptKey, key_of_text, key_of_tokens
from jaxserve.serve.convert import abort_from_proto, refuse_unknown_fields
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.received import Received
from jaxserve.serve.retry_info import retry_after_s
from jaxserve.serve.route_pool import Backend, Pool

logger = logging.getLogger(__name__)

_ASK_S = 30.0  # for calls that compute nothing
_LOOK_S = 1.0
_LOAD_S = 2.0  # a replica that has just fallen silent must not hold up the sum of the others
_SUMS = (
    "num_running", "num_waiting", "num_waiting_tokens", "max_waiting", "max_waiting_tokens", "num_pages",
    "num_used_pages",
)  # fmt: skip
_TRACE_KEYS = ("traceparent", "tracestate")
DESTINATION_HEADER = "x-gateway-destination-endpoint"  # of the endpoint picker protocol: HOST:PORT,HOST:PORT,...

# A server that vanishes, or that cancels its calls when it goes.
_DEATHS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_CUT_OFF = "it was shut down before the end of the request"


class MoveLimits(NamedTuple):
    """When a request is given up: after more deaths than `retries` without a new token between them, or when no replica
    has been well for `wait_s` seconds."""

    retries: int
    wait_s: float


class RouteService(pb_grpc.InferenceServicer):
    """The methods. Used on one event loop, which alone mutates it."""

    def __init__(self, pool: Pool, limits: MoveLimits) -> None:
        self._pool = pool
        self._limits = limits
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
        """Forwards one request. Raises typed errors; a cancel, whatever its cause, is passed on to the replica."""
        if not self._accepting:
            raise EngineStopped("the router takes no more requests: it is shutting down")
        # One id and one seed for all attempts; and a replica could not know that the same id is live on another.
        request.request_id = request.request_id or uuid.uuid4().hex
        if not request.sampling.HasField("seed"):
            request.sampling.seed = secrets.randbits(63)
        if (same := self._live.get(request.request_id)) is not None:
            if not request.HasField("resume"):
                raise InvalidRequest(f"a request with id {request.request_id!r} is live already; choose another")
            same.end()  # itself, on a connection that has been lost
        forward = _Forward(self._pool, request, context, self._limits)
        self._live[request.request_id] = forward
        try:
            await forward.run()
        finally:
            if self._live.get(request.request_id) is forward:
                del self._live[request.request_id]

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        """Answered by any replica: they serve the same model."""
        return await self._ask_any(lambda stub: stub.Tokenize, request, context)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Of any replica."""
        return await self._ask_any(lambda stub: stub.Detokenize, request, context)

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        """Of any replica."""
        return await self._ask_any(lambda stub: stub.GetModel, request, context)

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        """The sums over the replicas that answer in time."""
        refuse_unknown_fields(request)
        answers = await asyncio.gather(
            *(b.stub.GetLoad(request, timeout=_LOAD_S, metadata=self._pool.metadata) for b in self._pool.well),
            return_exceptions=True,
        )
        loads = [answer for answer in answers if isinstance(answer, pb.GetLoadResponse)]
        total = pb.GetLoadResponse(accepting=self._accepting and any(load.accepting for load in loads))
        for name in _SUMS:
            setattr(total, name, sum(getattr(load, name) for load in loads))
        total.num_replicas = len(loads)
        return total

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends requests that came through this router."""
        forwards = [self._live[request_id] for request_id in abort_from_proto(request) if request_id in self._live]
        await asyncio.gather(*(forward.abort() for forward in forwards))
        return pb.AbortResponse()

    async def _ask_any(
        self, method: Callable[[pb_grpc.InferenceStub], Any], request: Message, context: grpc.aio.ServicerContext
    ) -> Any:
        """Asks one replica, and others when it dies. Ends the call with the status that it gives."""
        tried: list[str] = []
        failure: grpc.aio.AioRpcError | None = None
        while len(tried) <= self._limits.retries and (backend := self._pool.choose((), tried)) is not None:
            tried.append(backend.address)
            try:
                return await method(backend.stub)(request, timeout=_ASK_S, metadata=self._pool.metadata)
            except grpc.aio.AioRpcError as error:
                failure = error
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise QueueFull(error.details() or "", retry_after_s=retry_after_s(error)) from error
                if error.code() not in _DEATHS:
                    await context.abort(error.code(), error.details() or "")
                self._pool.suspect(backend, error.details() or error.code().name)
        why = f": {failure.details()}" if failure is not None else f": {self._pool.describe(tried)}"
        raise EngineStopped(f"no replica is well{why}")


class _Forward:
    """One call on its way. Mutated by its handler; `end` may be called from elsewhere on the event loop."""

    def __init__(
        self, pool: Pool, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, limits: MoveLimits
    ) -> None:
        self._pool = pool
        self._request = request
        self._context = context
        self._limits = limits
        self._key = key_of_request(request) if pool.uses_prompt else ()
        self._call: grpc.aio.UnaryStreamCall | None = None
        self._received = Received(request)
        self._ending = False
        self._aborted = False
        self._backend: Backend | None = None
        self._retry_after_s: float | None = None
        self._deadline_s = 0.0  # of the wait for another replica
        trace = [(k, v) for k, v in context.invocation_metadata() or () if k in _TRACE_KEYS]
        self._metadata = (*pool.metadata, *trace)
        self._wanted = _destinations(context) if pool.obeys_header else ()

    async def abort(self) -> None:
        """Lets the replica end the request: the stream then ends with ABORT like any other."""
        self._aborted = True
        if self._backend is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):  # a replica that is dying ends it too
                await self._backend.stub.Abort(
                    pb.AbortRequest(request_ids=[self._request.request_id]),
                    timeout=_ASK_S,
                    metadata=self._pool.metadata,
                )

    def end(self) -> None:
        self._ending = True
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        unwell: set[str] = set()  # replicas that are not tried again: full ones, and the one that has just died
        deaths: list[str] = []  # since the last token
        full: list[QueueFull] = []
        while True:
            backend = await self._choose(unwell, bool(deaths))
            if self._ending:
                raise self._shut_down()
            if self._aborted:
                return await self._end_aborted()
            if backend is None or len(deaths) > self._limits.retries or len(full) > 1:
                self._give_up(unwell, deaths, full)
            num_before = self._received.num_tokens
            with self._pool.carrying(self._key, backend):
                failure = await self._attempt(backend)
            if failure is None or self._received.complete:  # all that was missing is the status
                return None
            code, text = failure
            if code in _DEATHS:
                self._pool.suspect(backend, text)
                if self._received.num_tokens > num_before or not deaths:
                    deaths.clear()
                    unwell.clear()
                    self._deadline_s = asyncio.get_running_loop().time() + self._limits.wait_s
                deaths.append(f"{backend.address}: {text}")
                self._prepare_move(backend, text)
            elif code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                await self._context.abort(code, text)
            elif not deaths:
                full.append(QueueFull(text, retry_after_s=self._retry_after_s))
            unwell.add(backend.address)

    async def _choose(self, unwell: set[str], accepted: bool) -> Backend | None:
        """A replica for the next attempt. `accepted`: by one that died, so that the request waits for another."""
        backend = self._pool.choose(self._key, unwell, self._wanted)
        while backend is None and accepted and not (self._ending or self._aborted):
            left_s = self._deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await self._pool.wait_well(min(left_s, _LOOK_S))  # those that were full may have room by then
            unwell.clear()
            backend = self._pool.choose(self._key, unwell, self._wanted)
        return backend

    def _prepare_move(self, backend: Backend, text: str) -> None:
        """Makes the request one that goes on behind what the client has. Raises DeadlineExceeded."""
        self._received.go_on(self._request, ResumeReason.DRAINED if text == _CUT_OFF else ResumeReason.DIED)
        if self._received.begun:
            logger.info(
                "request %r leaves replica %s after %d tokens: %s",
                self._request.request_id, backend.address, self._received.num_tokens, text,
            )  # fmt: skip

    def _give_up(self, unwell: Collection[str], deaths: list[str], full: list[QueueFull]) -> NoReturn:
        """Raises the client's error when no attempt is left."""
        if full:  # a replica with room may have died, but to try again later is the better advice
            raise min(full, key=lambda error: error.retry_after_s or 0.0)
        num_tokens = self._received.num_tokens
        state = f"after {num_tokens} tokens had been streamed" if self._received.begun else "before an answer"
        if len(deaths) > self._limits.retries:
            raise EngineStopped(
                f"{len(deaths)} replicas have died with this request {state}, without a new token, and no more are "
                f"tried (route.retries is {self._limits.retries}): {'; '.join(deaths)}"
            )
        rest = self._pool.describe(unwell)
        if not deaths:
            raise EngineStopped(f"no replica is well: {rest}")
        raise EngineStopped(
            f"the replica with this request has died {state} ({'; '.join(deaths)}), and no other "
            f"was well within {self._limits.wait_s:g} s (route.wait_s)" + (f": {rest}" if rest else "")
        )

    async def _attempt(self, backend: Backend) -> tuple[grpc.StatusCode, str] | None:
        """None when the call has ended well, else its status and text."""
        # None where the client set no deadline, despite the signature.
        call = self._call = backend.stub.Generate(
            self._request, timeout=self._context.time_remaining(), metadata=self._metadata
        )
        self._backend = backend
        watch = asyncio.create_task(_cancel_when(backend.gone, call))
        try:
            async for reply in call:
                if reply.finish_reason == pb.FINISH_REASON_ABORT and not self._aborted:
                    return grpc.StatusCode.UNAVAILABLE, _CUT_OFF
                self._received.take(reply)
                await self._context.write(reply)
        except grpc.aio.AioRpcError as error:
            self._retry_after_s = retry_after_s(error)
            return error.code(), error.details() or ""
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if watch.done() and not (task is not None and task.cancelling()):
                return grpc.StatusCode.UNAVAILABLE, f"it answers no more: {backend.reason}"
            if not self._ending:
                raise
            raise self._shut_down() from None
        finally:
            self._backend = None
            watch.cancel()
            call.cancel()
        return None

    async def _end_aborted(self) -> None:
        """Ends the stream of a request that no replica has any more."""
        indices = self._received.open_indices
        for index in indices:
            reply = pb.GenerateResponse(
                request_id=self._request.request_id, index=index, finish_reason=pb.FINISH_REASON_ABORT
            )
            if index == indices[-1]:
                reply.usage.num_generated_tokens = self._received.num_tokens
            await self._context.write(reply)

    def _shut_down(self) -> EngineStopped:
        return EngineStopped(f"the router is shutting down; {self._received.num_tokens} tokens had been streamed")


async def _cancel_when(gone: asyncio.Event, call: grpc.aio.UnaryStreamCall) -> None:
    await gone.wait()
    call.cancel()


def _destinations(context: grpc.aio.ServicerContext) -> tuple[str, ...]:
    """What an endpoint picker has chosen for this call; empty without one."""
    values = [str(value) for key, value in context.invocation_metadata() or () if key == DESTINATION_HEADER]
    return tuple(address for value in values for part in value.split(",") if (address := part.strip()))


def key_of_request(request: pb.GenerateRequest) -> PromptKey:
    """The key of the prompt as it came: text stays text, since only a replica has the tokenizer."""
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return key_of_tokens(request.token_ids.ids, cache_salt=request.cache_salt)
    text = request.text
    if kind == "chat":
        text = "".join(f"\x02{m.role}\x03{m.content}" for m in request.chat.messages)
    return key_of_text(text, cache_salt=request.cache_salt)
