"""`jaxserve.v1.Inference` answered by replicas: one call in, one call out, and a second one when a replica dies.

Replicas are known to `route_pool`; errors become statuses in `grpc_errors`. A call moves to another replica only while
its client has seen nothing: from then on half of an answer has been sent, and only the client knows whether it may be
repeated.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from jaxserve.errors import DeadlineExceeded, EngineStopped, InvalidRequest, QueueFull
from jaxserve.routing import PromptKey, key_of_text, key_of_tokens
from jaxserve.serve.convert import abort_from_proto, refuse_unknown_fields
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.retry_info import retry_after_s
from jaxserve.serve.route_pool import Backend, Pool

_ASK_S = 30.0  # for calls that compute nothing
_LOAD_S = 2.0  # a replica that has just fallen silent must not hold up the sum of the others
_SUMS = (
    "num_running", "num_waiting", "num_waiting_tokens", "max_waiting", "max_waiting_tokens", "num_pages",
    "num_used_pages",
)  # fmt: skip
_TRACE_KEYS = ("traceparent", "tracestate")
DESTINATION_HEADER = "x-gateway-destination-endpoint"  # of the endpoint picker protocol: HOST:PORT,HOST:PORT,...

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
        """Forwards one request. Raises typed errors; a cancel, whatever its cause, is passed on to the replica."""
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
        while len(tried) <= self._retries and (backend := self._pool.choose((), tried)) is not None:
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
        self._aborted = False
        self._backend: Backend | None = None
        self._retry_after_s: float | None = None
        self._arrived_s = asyncio.get_running_loop().time()
        self._timeout_s = request.timeout_s if request.HasField("timeout_s") else None
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
        tried: list[str] = []
        deaths: list[str] = []
        full: list[QueueFull] = []
        while True:
            backend = self._pool.choose(self._key, tried, self._wanted)
            if backend is None or len(deaths) > self._retries or len(full) > 1:
                self._give_up(tried, deaths, full)
            if tried:
                self._shorten_timeout()
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
                full.append(QueueFull(text, retry_after_s=self._retry_after_s))
            else:
                await self._context.abort(code, text)

    def _give_up(self, tried: list[str], deaths: list[str], full: list[QueueFull]) -> NoReturn:
        """Raises the client's error when no attempt is left."""
        if full:  # a replica with room may have died, but to try again later is the better advice
            raise min(full, key=lambda error: error.retry_after_s or 0.0)
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
        if self._aborted:
            await self._context.write(
                pb.GenerateResponse(
                    request_id=self._request.request_id, finish_reason=pb.FINISH_REASON_ABORT, usage=pb.Usage()
                )
            )
            return None
        # None where the client set no deadline, despite the signature.
        call = self._call = backend.stub.Generate(
            self._request, timeout=self._context.time_remaining(), metadata=self._metadata
        )
        self._backend = backend
        try:
            async for reply in call:
                if not self._num_replies and _is_cut_off(reply) and not self._aborted:
                    return grpc.StatusCode.UNAVAILABLE, "it was shut down before it began with the request"
                self._num_replies += 1
                self._num_tokens += len(reply.token_ids)
                await self._context.write(reply)
        except grpc.aio.AioRpcError as error:
            self._retry_after_s = retry_after_s(error)
            return error.code(), error.details() or ""
        except asyncio.CancelledError:
            if not self._ending:
                raise
            raise EngineStopped(f"the router is shutting down; {self._num_tokens} tokens had been streamed") from None
        finally:
            self._backend = None
            call.cancel()
        return None

    def _shorten_timeout(self) -> None:
        """`timeout_s` counts from the arrival here: earlier attempts have used some of it. Raises DeadlineExceeded."""
        given_s = self._timeout_s
        if given_s is None or not given_s > 0:  # an invalid value is refused by the replica
            return
        left_s = given_s - (asyncio.get_running_loop().time() - self._arrived_s)
        if left_s <= 0:
            raise DeadlineExceeded(f"the {given_s:g} s of the request were over before a replica had begun to answer")
        self._request.timeout_s = left_s


def _destinations(context: grpc.aio.ServicerContext) -> tuple[str, ...]:
    """What an endpoint picker has chosen for this call; empty without one."""
    values = [str(value) for key, value in context.invocation_metadata() or () if key == DESTINATION_HEADER]
    return tuple(address for value in values for part in value.split(",") if (address := part.strip()))


def _is_cut_off(reply: pb.GenerateResponse) -> bool:
    """The error of a server for a request that had not begun when its time to drain was over."""
    return reply.finish_reason == pb.FINISH_REASON_ABORT and not reply.token_ids


def key_of_request(request: pb.GenerateRequest) -> PromptKey:
    """The key of the prompt as it came: text stays text, since only a replica has the tokenizer."""
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return key_of_tokens(request.token_ids.ids, cache_salt=request.cache_salt)
    text = request.text
    if kind == "chat":
        text = "".join(f"\x02{m.role}\x03{m.content}" for m in request.chat.messages)
    return key_of_text(text, cache_salt=request.cache_salt)
