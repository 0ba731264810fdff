"""What a gRPC client sees when a handler raises.

Owns the one place where exceptions become statuses, for all methods of jaxserve. Refuses to know a method: a handler
raises typed errors and never speaks in codes. Parsing is done here too, since gRPC itself answers an undecodable
message with UNKNOWN and a Python exception text.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jaxserve.errors import InvalidRequest, QueueFull, Status
from jaxserve.serve.retry_info import retry_metadata
from jaxserve.serve.status import GRPC_CODES, public_message, status_of

logger = logging.getLogger(__name__)


class TypedErrors(grpc.aio.ServerInterceptor):
    """Wraps the methods of `jaxserve.*` services; health and reflection keep their own manners."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # a grpc.RpcMethodHandler, or None for a method that does not exist
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/jaxserve."):
            return handler
        assert not handler.request_streaming, f"{handler_call_details.method} streams requests; wrap that kind too"
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        parse = handler.request_deserializer

        async def call(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                return await behaviour(_parse(parse, raw), context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await _report(error, handler_call_details.method, context)

        wrap = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return wrap(call, request_deserializer=None, response_serializer=handler.response_serializer)


def _parse(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return parse(raw)
    except DecodeError as error:
        raise InvalidRequest(f"the message cannot be decoded: {error}; text must be valid UTF-8") from error


async def _report(error: Exception, method: str, context: grpc.aio.ServicerContext) -> None:
    """Ends the call with the status of `error`. Always raises, unless the client has left already."""
    # A write to a client that has just gone fails in ways of its own, at times before the context has heard of it.
    if context.done() or isinstance(error, grpc.aio.InternalError):
        logger.debug("%s: the client left: %r", method, error)
        return
    status = status_of(error)
    reference = f"error {uuid.uuid4().hex[:12]}"
    if status is Status.INTERNAL:
        logger.error("%s failed, %s", method, reference, exc_info=error)
    code, message = GRPC_CODES[status], public_message(error, reference)
    details: tuple[tuple[str, bytes], ...] = ()
    if isinstance(error, QueueFull) and error.retry_after_s is not None:
        details = retry_metadata(code, message, error.retry_after_s)
    await context.abort(code, message, details)
