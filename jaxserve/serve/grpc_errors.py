"""The one place where exceptions become gRPC statuses, for all methods of jaxserve.

A handler raises typed errors and never uses codes. Parsing is done here too, since gRPC itself answers an undecodable
message with UNKNOWN and a Python exception text. So messages are counted here as they came, until their calls end, and
large ones are parsed one after the other (`LargeReads`).

What a message has is known when all of it has come. So gRPC itself reads none: to it every method takes a stream, of
which the first message is read here, a few of a caller at a time. What is not read stays with its client, but for the
first 64 KiB (`grpc_server`).
"""

import asyncio
import collections
import contextlib
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jaxserve.config.schema import GrpcConfig
from jaxserve.engine.shared_room import SharedRoom
from jaxserve.errors import DeadlineExceeded, InvalidRequest, MessagesFull, Status
from jaxserve.serve.counts import GRPC, OTHER, DoorCounts, Refusal, reason_of
from jaxserve.serve.large_reads import LARGE_BYTES, LargeReads
from jaxserve.serve.owners import Owners
from jaxserve.serve.status import GRPC_CODES, public_message, status_of
from jaxserve.serve.status_details import details_of

logger = logging.getLogger(__name__)

_OWN = "/jaxserve."
_SMALL_BYTES = 1024  # of a message to health or reflection, which is always read: a probe must be answered
_AT_ONCE = 8  # messages of a caller that are being read; those that are being parsed are among them
_MOST_UNREAD = 4096  # calls of a caller whose messages have not been read: each has up to 64 KiB of its own
_RETRY_S = 1.0
_ID = re.compile(r"[!-~]{1,256}")  # as HTTP has it: a request's id may be any text, which has no place in a log


class TypedErrors(grpc.aio.ServerInterceptor):
    """Wraps all methods, and counts those of `jaxserve.*` services."""

    def __init__(self, counts: DoorCounts, config: GrpcConfig, owners: Owners, reads: LargeReads) -> None:
        """`config`: the limits of messages. `owners`: tells whose they are. `reads`: for large ones."""
        self._counts = counts
        self._room: SharedRoom[str] = SharedRoom(config.max_messages_bytes)
        self._arrivals = Arrivals()
        self._message_timeout_s = config.message_timeout_s
        self._owners = owners
        self._reads = reads

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # a grpc.RpcMethodHandler, or None for a method that does not exist
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            self._counts.note_grpc(OTHER, grpc.StatusCode.UNIMPLEMENTED.name)
            return None
        if handler.request_streaming:
            assert not method.startswith(_OWN), f"{method} streams requests; count its messages"
            return _streaming(handler, method)
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        parse = handler.request_deserializer
        name = method.rpartition("/")[2]
        counts = self._counts if method.startswith(_OWN) else None

        async def call(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            code = grpc.StatusCode.CANCELLED  # the call ended without an answer or an error: its client has left
            owner, size, is_in, raw, request = "", 0, False, None, None
            try:
                owner = self._owners.of_call(context).id
                # A probe has places of its own, so that it does not wait for messages of other methods.
                async with self._arrivals.place((owner, counts is None)):
                    raw = await self._read(context)
                    if raw is None:
                        await _refuse_empty(context)
                        return None
                    size = len(raw)
                    self._enter(owner, size, at_any_rate=counts is None and size <= _SMALL_BYTES)
                    is_in = True
                    request = await self._parsed(parse, raw, owner)
                    raw = None
                answer = await behaviour(request, context)
                code = grpc.StatusCode.OK
                return answer
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                if not _has_left(error, context):
                    code = GRPC_CODES[status_of(error)]
                    if counts is not None:
                        counts.note_refusal(Refusal(GRPC, reason_of(error), code.name, name, _id_of(request)))
                raw = request = None  # else kept as `_forget_frames` says: this frame is one of those
                await _report(error, method, context)
            finally:
                if is_in:
                    self._room.leave(owner, size)
                if counts is not None:
                    counts.note_grpc(name, code.name)

        wrap = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return wrap(call, request_deserializer=None, response_serializer=_sent(handler.response_serializer))

    async def _read(self, context: grpc.aio.ServicerContext) -> bytes | None:
        """The message of the call; None where the client has sent none, one that is too long, or has left."""
        try:
            async with asyncio.timeout(self._message_timeout_s):
                raw = await context.read()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the message did not arrive within {self._message_timeout_s:g} s (serve.grpc.message_timeout_s); "
                "send it sooner or faster"
            ) from error
        return raw if isinstance(raw, bytes) else None  # gRPC's mark of the end is neither bytes nor documented

    async def _parsed(self, parse: Callable[[bytes], Any], raw: bytes, owner: str) -> Any:
        if len(raw) <= LARGE_BYTES:
            return _parse(parse, raw)
        return await self._reads.run(owner, lambda: _parse(parse, raw))

    def _enter(self, owner: str, size: int, *, at_any_rate: bool) -> None:
        # One message alone is read, whatever it has: its own limit is another setting.
        if not self._room.enter(owner, size, at_any_rate=at_any_rate or not self._room.total):
            raise MessagesFull(
                f"there is no room for this message of {size} bytes: those of all calls have {self._room.total} and "
                f"yours {self._room.held(owner)}; together they may have {self._room.most} "
                "(serve.grpc.max_messages_bytes), and while these are taken a caller may have "
                f"{self._room.part(owner)}; try again later",
                retry_after_s=_RETRY_S,
            )


class Arrivals:
    """Places in which messages arrive: so many for each caller that one who sends slowly costs the others none. Used on
    one event loop."""

    def __init__(self) -> None:
        self._places: dict[Hashable, asyncio.Semaphore] = {}
        self._num_calls: collections.Counter[Hashable] = collections.Counter()

    @contextlib.asynccontextmanager
    async def place(self, owner: Hashable) -> AsyncIterator[None]:
        """Waits for a place, and holds it within. Raises MessagesFull when too many wait."""
        if self._num_calls[owner] >= _MOST_UNREAD:
            raise MessagesFull(
                f"{_MOST_UNREAD} calls of yours wait for their messages to be read, and no more may; try again later",
                retry_after_s=_RETRY_S,
            )
        places = self._places.setdefault(owner, asyncio.Semaphore(_AT_ONCE))
        self._num_calls[owner] += 1
        try:
            async with places:
                yield
        finally:
            self._num_calls[owner] -= 1
            if not self._num_calls[owner]:
                del self._num_calls[owner], self._places[owner]


async def _refuse_empty(context: grpc.aio.ServicerContext) -> None:
    """Ends a call without a message, should its client still be there."""
    with contextlib.suppress(grpc.aio.InternalError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message; send one")


def _streaming(handler: Any, method: str) -> Any:
    """Reflection, which answers each message of a stream at once, so that none is counted."""
    behaviour, parse = handler.stream_stream, handler.request_deserializer

    async def call(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async def messages() -> AsyncIterator[Any]:
            async for raw in raws:
                yield _parse(parse, raw)

        try:
            async for answer in behaviour(messages(), context):
                yield answer
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _report(error, method, context)

    return grpc.stream_stream_rpc_method_handler(
        call, request_deserializer=None, response_serializer=handler.response_serializer
    )


def _sent(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Large answers have been serialised in pieces, and come as they are sent."""
    return lambda answer: answer if isinstance(answer, bytes) else serialize(answer)


def _parse(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return parse(raw)
    except DecodeError as error:
        raise InvalidRequest(f"the message cannot be decoded: {error}; text must be valid UTF-8") from error


def _id_of(request: Any) -> str | None:
    """Of a message that may have one, or that could not be read."""
    given: str = getattr(request, "request_id", "")
    return given if _ID.fullmatch(given) else None


def _has_left(error: Exception, context: grpc.aio.ServicerContext) -> bool:
    """A write to a client that has just gone fails in ways of its own, at times before the context has heard of it."""
    return context.done() or isinstance(error, grpc.aio.InternalError)


async def _report(error: Exception, method: str, context: grpc.aio.ServicerContext) -> None:
    """Ends the call with the status of `error`. Always raises, unless the client has left already."""
    if _has_left(error, context):
        logger.debug("%s: the client left: %r", method, error)
        return
    status = status_of(error)
    reference = f"error {uuid.uuid4().hex[:12]}"
    if status is Status.INTERNAL:
        logger.error("%s failed, %s", method, reference, exc_info=error)
    code, message = GRPC_CODES[status], public_message(error, reference)
    details = details_of(error, code, message)
    _forget_frames(error)
    await context.abort(code, message, details)


def _forget_frames(error: BaseException) -> None:
    """Frees what the calls that raised `error` were working on.

    gRPC keeps its own error in the state of the call, with this one as its context, and their frames know the call: a
    cycle, which would keep the message until the collector comes. Beside an engine that works it hardly comes.
    """
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
