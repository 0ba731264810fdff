"""The one place where exceptions become gRPC statuses, for all methods of jaxserve.

A handler raises typed errors and never uses codes. Parsing is done here too, since gRPC itself answers an undecodable
message with UNKNOWN and a Python exception text.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jaxserve.errors import InvalidRequest, Status
from jaxserve.serve.counts import GRPC, OTHER, DoorCounts, reason_of
from jaxserve.serve.status import GRPC_CODES, public_message, status_of
from jaxserve.serve.status_details import details_of

logger = logging.getLogger(__name__)


class TypedErrors(grpc.aio.ServerInterceptor):
    """Wraps and counts the methods of `jaxserve.*` services; health and reflection are left as they are."""

    def __init__(self, counts: DoorCounts) -> None:
        self._counts = counts

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # a grpc.RpcMethodHandler, or None for a method that does not exist
        handler = await continuation(handler_call_details)
        if handler is None:
            self._counts.note_grpc(OTHER, grpc.StatusCode.UNIMPLEMENTED.name)
        if handler is None or not handler_call_details.method.startswith("/jaxserve."):
            return handler
        assert not handler.request_streaming, f"{handler_call_details.method} streams requests; wrap that kind too"
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        parse = handler.request_deserializer
        method, counts = handler_call_details.method, self._counts

        async def call(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            code = grpc.StatusCode.CANCELLED  # the call ended without an answer or an error: its client has left
            try:
                answer = await behaviour(_parse(parse, raw), context)
                code = grpc.StatusCode.OK
                return answer
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                if not _has_left(error, context):
                    code = GRPC_CODES[status_of(error)]
                    counts.note_refusal(GRPC, reason_of(error))
                await _report(error, method, context)
            finally:
                counts.note_grpc(method.rpartition("/")[2], code.name)

        wrap = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return wrap(call, request_deserializer=None, response_serializer=handler.response_serializer)


def _parse(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return parse(raw)
    except DecodeError as error:
        raise InvalidRequest(f"the message cannot be decoded: {error}; text must be valid UTF-8") from error


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
    await context.abort(code, message, details_of(error, code, message))
