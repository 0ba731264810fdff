"""`jaxserve.v1.Inference` answered by replicas: one call in, one call out, and another one when a replica dies.

Replicas are known to `route_pool`; errors become statuses in `grpc_errors`. A call that has been answered in part goes
on at another replica behind what the client has (`received`), so that the client cannot tell. A call that may itself be
what its replicas die of runs alone, and is refused when that is proved (`suspects`).
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import grpc
from google.protobuf.message import Message

from jaxserve.api import ResumeReason
from jaxserve.errors import Draining, EngineStopped, InvalidRequest, QueueFull
from jaxserve.routing import PromptKey, key_of_text, key_of_tokens
from jaxserve.serve.convert import abort_from_proto, refuse_unknown_fields
from jaxserve.serve.gen import handoff_pb2 as handoff_pb
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.owners import PROCESS, Owner, Owners
from jaxserve.serve.quarantine import Quarantine
from jaxserve.serve.received import Received
from jaxserve.serve.route_apart import Apart, Missed
from jaxserve.serve.route_pool import Backend, Place, Pool
from jaxserve.serve.route_prompts import PoolPrompts
from jaxserve.serve.status_details import is_draining, retry_after_s
from jaxserve.serve.suspects import Deaths
from jaxserve.values.content import private_salt

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
# How gRPC begins the text of a call that it could not send; the status alone is also that of a connection that broke.
_NO_CONNECTION = "failed to connect to all addresses"


class Caller(Protocol):
    """The caller of a method: the context of gRPC, or another door of the router (`route_engine`)."""

    def invocation_metadata(self) -> Any:
        """The names and values that came with the call, in pairs, or None."""
        ...

    def peer(self) -> str:
        """The address of the caller, as gRPC writes it."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until its deadline; None: it has none."""
        ...

    async def write(self, message: pb.GenerateResponse) -> None:
        """Sends the next message of a stream."""
        ...

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Ends the call with this status, by an exception."""
        ...


class MoveLimits(NamedTuple):
    """When a request is given up: after more deaths than `retries` without a new token between them, or when no replica
    has been well for `wait_s` seconds. A replica that drains has not died, nor has one that was gone before."""

    retries: int
    wait_s: float


class _Failure(NamedTuple):
    """How a call to a replica ended, that did not end well. OK: it was ended here, to go on at another replica."""

    code: grpc.StatusCode
    text: str
    drained: bool = False  # the replica is shutting down in order
    unreached: bool = False  # no connection could be made: the replica has not seen the request
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> "_Failure":
        text = error.details() or ""
        return cls(
            error.code(),
            text,
            drained=is_draining(error),
            unreached=error.code() is grpc.StatusCode.UNAVAILABLE and text.startswith(_NO_CONNECTION),
            retry_after_s=retry_after_s(error),
        )


_EMPTIED = _Failure(grpc.StatusCode.OK, "it is emptied for a suspect")
_CLEARED = _Failure(grpc.StatusCode.OK, "it is no suspect any more")


class RouteCounts:
    """`moves`: requests that went on at another replica, by why they left the one before. Mutated on the event loop."""

    def __init__(self) -> None:
        self.moves = {"died": 0, "drained": 0, "emptied": 0}


class RouteService(pb_grpc.InferenceServicer):
    """The methods. Used on one event loop, which alone mutates it."""

    def __init__(
        self, pool: Pool, limits: MoveLimits, apart: Apart, quarantine: Quarantine, owners: Owners | None = None
    ) -> None:
        """`owners`: of the calls over gRPC; None: all are the process's own."""
        self._pool = pool
        self._owners = owners
        self._limits = limits
        self._apart = apart
        self._quarantine = quarantine
        self._live: dict[str, _Forward] = {}  # by `Owner.own`
        self._accepting = True
        self.counts = RouteCounts()

    @property
    def accepting(self) -> bool:
        """Whether new calls are taken."""
        return self._accepting

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

    def _owner_of(self, context: Caller) -> Owner:
        return PROCESS if self._owners is None else self._owners.of_call(context)

    async def Generate(self, request: pb.GenerateRequest, context: Caller) -> None:
        """Forwards one request. Raises typed errors; a cancel, whatever its cause, is passed on to the replica."""
        await self.forward(request, context, self._owner_of(context))

    async def forward(self, request: pb.GenerateRequest, context: Caller, owner: Owner) -> None:
        """`Generate` for this owner."""
        if not self._accepting:
            raise Draining("the router takes no more requests: it is shutting down")
        self._quarantine.check(request)
        # One id and one seed for all attempts; and a replica could not know that the same id is live on another.
        request.request_id = request.request_id or uuid.uuid4().hex
        if not request.sampling.HasField("seed"):
            request.sampling.seed = secrets.randbits(63)
        name = owner.own(request.request_id)
        if (same := self._live.get(name)) is not None:
            if not request.HasField("resume"):
                raise InvalidRequest(f"a request with id {request.request_id!r} is live already; choose another")
            same.end()  # itself, on a connection that has been lost
        forward = _Forward(
            self._pool, request, context, owner, self._limits, self._apart, self._quarantine, self.counts
        )
        self._live[name] = forward
        try:
            await forward.run()
        finally:
            if self._live.get(name) is forward:
                del self._live[name]

    async def Tokenize(self, request: pb.TokenizeRequest, context: Caller) -> pb.TokenizeResponse:
        """Answered by any replica: they serve the same model."""
        return await self._ask_any(lambda stub: stub.Tokenize, request, context)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Caller) -> pb.DetokenizeResponse:
        """Of any replica."""
        return await self._ask_any(lambda stub: stub.Detokenize, request, context)

    async def GetModel(self, request: pb.GetModelRequest, context: Caller) -> pb.GetModelResponse:
        """Of any replica."""
        return await self._ask_any(lambda stub: stub.GetModel, request, context)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Caller) -> pb.GetLoadResponse:
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

    async def Abort(self, request: pb.AbortRequest, context: Caller) -> pb.AbortResponse:
        """Ends requests of the caller that came through this router."""
        owner = self._owner_of(context)
        names = [owner.own(request_id) for request_id in abort_from_proto(request)]
        forwards = [self._live[name] for name in names if name in self._live]
        await asyncio.gather(*(forward.abort() for forward in forwards))
        return pb.AbortResponse()

    async def _ask_any(self, method: Callable[[pb_grpc.InferenceStub], Any], request: Message, context: Caller) -> Any:
        """Asks one replica, and others when it dies. Ends the call with the status that it gives."""
        metadata = (*self._pool.metadata, *self._owner_of(context).metadata)
        tried: list[str] = []
        failure: grpc.aio.AioRpcError | None = None
        while (
            len(tried) <= self._limits.retries
            and (backend := self._pool.choose((), tried, reserved_too=True)) is not None
        ):
            tried.append(backend.address)
            try:
                return await method(backend.stub)(request, timeout=_ASK_S, metadata=metadata)
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
        self,
        pool: Pool,
        request: pb.GenerateRequest,
        context: Caller,
        owner: Owner,
        limits: MoveLimits,
        apart: Apart,
        quarantine: Quarantine,
        counts: RouteCounts,
    ) -> None:
        self._pool = pool
        self._apart = apart
        self._quarantine = quarantine
        self._counts = counts
        self._request = request
        self._context = context
        self._limits = limits
        self._key = key_of_request(request, owner.salt) if pool.uses_prompt else ()
        self._call: grpc.aio.UnaryStreamCall | None = None
        self._work: asyncio.Future[Any] | None = None  # of a handoff
        self._takes_ticket = True  # False: a replica has refused one, and would refuse the next as well
        self._received = Received(request)
        self._deaths = Deaths(self._received.num_tokens)
        self._ending = False
        self._aborted = False
        self._backend: Backend | None = None
        self._deadline_s = 0.0  # of the wait for another replica; 0 before one has accepted the request
        trace = [(k, v) for k, v in context.invocation_metadata() or () if k in _TRACE_KEYS]
        self._signed = (*pool.metadata, *owner.metadata)  # of all calls for this owner
        self._metadata = (*self._signed, *trace)
        self._wanted = _destinations(context) if pool.obeys_header else ()

    @property
    def _accepted(self) -> bool:
        return self._deadline_s > 0

    async def abort(self) -> None:
        """Lets the replica end the request: the stream then ends with ABORT like any other."""
        self._aborted = True
        if self._work is not None:
            self._work.cancel()
        if self._backend is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):  # a replica that is dying ends it too
                await self._backend.stub.Abort(
                    pb.AbortRequest(request_ids=[self._request.request_id]),
                    timeout=_ASK_S,
                    metadata=self._signed,
                )

    def end(self) -> None:
        self._ending = True
        for call in (self._call, self._work):
            if call is not None:
                call.cancel()

    async def run(self) -> None:
        unwell: set[str] = set()  # replicas that are not tried again: full ones, and the one that has just died
        full: list[QueueFull] = []
        while True:
            was_suspected = self._deaths.suspected
            async with self._place(unwell, full) as (backend, alone):
                if self._ending:
                    raise self._shut_down()
                if self._aborted:
                    return await self._end_aborted()
                if backend is None or self._deaths.num_recent > self._limits.retries or len(full) > 1:
                    self._give_up(unwell, full)
                num_before = self._received.num_tokens
                with self._pool.carrying(self._key, backend):
                    failure = await self._prefill_elsewhere(backend)
                    if self._ending or self._aborted:
                        continue
                    if self._deaths.suspected and not was_suspected:
                        continue  # by those that computed its prompt
                    if failure is None:
                        failure = await self._attempt(backend, alone)
            if failure is None or self._received.complete:  # all that was missing is the status
                return None
            if failure.code is grpc.StatusCode.OK:
                unwell.clear()
                self._start_wait()
                self._prepare_move(backend, failure)
                continue
            if failure.code is grpc.StatusCode.INVALID_ARGUMENT and self._request.ticket and not self._received.begun:
                logger.warning("replica %s does not take a ticket: %s", backend.address, failure.text)
                self._request.ClearField("ticket")
                self._takes_ticket = False
                continue  # if it is the request that is wrong, the replica says so again
            if failure.code in _DEATHS:
                self._pool.suspect(backend, failure.text)
                if self._received.num_tokens > num_before or not self._deaths.losses:
                    unwell.clear()
                    self._start_wait()
                self._note_loss(backend.address, failure, alone)
                self._prepare_move(backend, failure)
            elif failure.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                await self._context.abort(failure.code, failure.text)
            elif not self._accepted:
                full.append(QueueFull(failure.text, retry_after_s=failure.retry_after_s))
            elif self._deaths.suspected:
                await asyncio.sleep(_LOOK_S)
            unwell.add(backend.address)

    def _start_wait(self) -> None:
        """From now on another replica has `wait_s` seconds to be well."""
        self._deadline_s = asyncio.get_running_loop().time() + self._limits.wait_s

    def _note_loss(self, address: str, failure: _Failure, alone: bool) -> None:
        """Raises RequestQuarantined when the request is what the replicas die of."""
        name, deaths = self._request.request_id, self._deaths
        innocent = failure.drained or failure.unreached
        deaths.note(address, failure.text, self._received.num_tokens, alone=alone, innocent=innocent)
        if deaths.convicted:
            digest = self._quarantine.add(self._request, "; ".join(deaths.losses))
            logger.error("request %r ends the replicas that run it: quarantined, digest %s", name, digest)
        elif deaths.suspected:
            logger.warning("request %r was at several deaths, and runs alone next", name)
        self._quarantine.check(self._request)

    @contextlib.asynccontextmanager
    async def _place(self, unwell: set[str], full: Collection[QueueFull]) -> AsyncIterator[Place]:
        """Where the next attempt runs; no replica when there is none, or the request has ended meanwhile."""
        if not self._deaths.suspected:
            yield Place(await self._choose(unwell, full), alone=False)
            return
        async with self._pool.reserve(self._limits.wait_s, lambda: self._ending or self._aborted) as place:
            self._quarantine.check(self._request)  # the same content may have been convicted while this one waited
            yield place

    def _note_prefill_death(self, missed: Missed) -> bool:
        """A replica is gone that computed the prompt. Returns whether the request is a suspect now."""
        self._start_wait()
        failure = _Failure(grpc.StatusCode.UNAVAILABLE, missed.reason, missed.drained)
        self._note_loss(missed.name, failure, alone=False)
        return self._deaths.suspected

    async def _prefill_elsewhere(self, backend: Backend) -> _Failure | None:
        """Has the prompt computed by another replica, if that is worth it. Returns the refusal of `backend`."""
        if backend.role in (None, handoff_pb.ROLE_PREFILL) or self._deaths.suspected:
            self._request.ClearField("ticket")  # of an attempt before
            return None
        if not (self._takes_ticket and self._pool.is_apart and self._apart.is_worth(self._request)):
            return None
        self._work = asyncio.ensure_future(self._prepare(backend))
        try:
            await self._work
            return None
        except grpc.aio.AioRpcError as refusal:
            return _Failure.of(refusal)
        except asyncio.CancelledError:
            if not (self._ending or self._aborted):
                raise
            return None
        finally:
            self._work.cancel()
            self._work = None

    async def _prepare(self, backend: Backend) -> None:
        """Sets room aside at `backend`, and puts a ticket into the request. Raises AioRpcError without room."""
        prompts, request = PoolPrompts(self._pool, self._signed), self._request
        if await prompts.offer(backend, request.request_id):
            await self._apart.prepare(
                prompts, request, self._key, backend.address, self._context.time_remaining, self._note_prefill_death
            )

    async def _choose(self, unwell: set[str], full: Collection[QueueFull]) -> Backend | None:
        """A replica for the next attempt. A request that one has accepted waits for another, and so does any request
        while one is kept for a suspect."""
        backend = self._pool.choose(self._key, unwell, self._wanted)
        while backend is None and not (self._ending or self._aborted):
            left_s = self._deadline_s - asyncio.get_running_loop().time()
            if self._pool.has_reserved and not full:
                left_s = _LOOK_S
                if self._accepted:
                    self._start_wait()
            if left_s <= 0:
                break
            await self._pool.wait_well(min(left_s, _LOOK_S))  # those that were full may have room by then
            unwell.clear()
            backend = self._pool.choose(self._key, unwell, self._wanted)
        return backend

    def _prepare_move(self, backend: Backend, failure: _Failure) -> None:
        """Makes the request one that goes on behind what the client has. Raises DeadlineExceeded."""
        self._received.go_on(self._request, ResumeReason.DRAINED if failure.drained else ResumeReason.DIED)
        if failure is not _CLEARED:
            self._counts.moves["emptied" if failure is _EMPTIED else "drained" if failure.drained else "died"] += 1
        if self._received.begun:
            logger.info(
                "request %r leaves replica %s after %d tokens: %s",
                self._request.request_id, backend.address, self._received.num_tokens, failure.text,
            )  # fmt: skip

    def _give_up(self, unwell: Collection[str], full: list[QueueFull]) -> NoReturn:
        """Raises the client's error when no attempt is left."""
        losses = self._deaths.losses
        if full:  # a replica with room may have died, but to try again later is the better advice
            raise min(full, key=lambda error: error.retry_after_s or 0.0)
        num_tokens = self._received.num_tokens
        state = f"after {num_tokens} tokens had been streamed" if self._received.begun else "before an answer"
        if self._deaths.num_recent > self._limits.retries:
            raise EngineStopped(
                f"{len(losses)} replicas have died with this request {state}, without a new token, and no more are "
                f"tried (route.retries is {self._limits.retries}): {'; '.join(losses)}"
            )
        rest = self._pool.describe(unwell)
        if not losses:
            raise EngineStopped(f"no replica is well: {rest}")
        raise EngineStopped(
            f"the replica with this request has died {state} ({'; '.join(losses)}), and no other "
            f"was well within {self._limits.wait_s:g} s (route.wait_s)" + (f": {rest}" if rest else "")
        )

    async def _attempt(self, backend: Backend, alone: bool) -> _Failure | None:
        """None when the call has ended well."""
        # None where the client set no deadline, despite the signature.
        call = self._call = backend.stub.Generate(
            self._request, timeout=self._context.time_remaining(), metadata=self._metadata
        )
        self._backend = backend
        parting = backend.parting
        watch = asyncio.create_task(parting.cancel(call))
        try:
            async for reply in call:
                self._received.take(reply)
                await self._context.write(reply)
                if alone and self._deaths.clear_beyond(self._received.num_tokens):
                    return _CLEARED  # others wait for this replica
        except grpc.aio.AioRpcError as error:
            return _Failure.of(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if watch.done() and not (task is not None and task.cancelling()):
                if not parting.died:
                    return _EMPTIED
                return _Failure(grpc.StatusCode.UNAVAILABLE, f"it answers no more: {backend.reason}")
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
            num_tokens, num_chars = self._received.offsets(index)
            reply = pb.GenerateResponse(
                request_id=self._request.request_id,
                index=index,
                finish_reason=pb.FINISH_REASON_ABORT,
                token_offset=num_tokens,
                text_offset=num_chars,
            )
            if index == indices[-1]:
                reply.usage.num_generated_tokens = self._received.num_tokens
            await self._context.write(reply)

    def _shut_down(self) -> Draining:
        return Draining(f"the router is shutting down; {self._received.num_tokens} tokens had been streamed")


def _destinations(context: Caller) -> tuple[str, ...]:
    """What an endpoint picker has chosen for this call; empty without one."""
    values = [str(value) for key, value in context.invocation_metadata() or () if key == DESTINATION_HEADER]
    return tuple(address for value in values for part in value.split(",") if (address := part.strip()))


def key_of_request(request: pb.GenerateRequest, owner_salt: str = "") -> PromptKey:
    """The key of the prompt as it came: text stays text, since only a replica has the tokenizer, and a picture is its
    file. Without the chat's order of text and pictures, those of a prompt count as its beginning. Adapters share no
    pages, so the name of the model is a part of it, and `owner_salt` is: see `Owner.salt`."""
    kind, salt = request.WhichOneof("prompt"), request.cache_salt
    if owner_salt:
        salt = private_salt(salt, f"owner={owner_salt}")
    if request.pictures:
        salt = f"{salt}|{_digests(request.pictures)}"
    if kind == "token_ids":
        return key_of_tokens(request.token_ids.ids, namespace=request.model, cache_salt=salt)
    text = request.text
    if kind == "chat":
        text = "".join(f"\x02{m.role}\x03{_digests(m.pictures)}{m.content}" for m in request.chat.messages)
    return key_of_text(text, namespace=request.model, cache_salt=salt)


def _digests(pictures: Sequence[bytes]) -> str:
    return "".join(hashlib.sha256(data).hexdigest() for data in pictures)
