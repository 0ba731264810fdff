"""What a status of gRPC says beside its code and text, as details of `google.rpc.Status`.

`RetryInfo` is the time after which to try again, which is estimated in `engine.waiting`. `ErrorInfo` with the reason
DRAINING says that a server is being shut down and has not failed. Both directions are here, so that server, router and
client agree.
"""

import datetime
from collections.abc import Sequence

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxserve.errors import Draining, QueueFull

DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN, _DRAINING = "jaxserve", "DRAINING"


def details_of(error: Exception, code: grpc.StatusCode, message: str) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for a call that ends with `code` and `message` because of `error`; empty for most errors."""
    if isinstance(error, QueueFull) and error.retry_after_s is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromTimedelta(datetime.timedelta(seconds=error.retry_after_s))
        return _metadata(code, message, info)
    if isinstance(error, Draining):
        return _metadata(code, message, error_details_pb2.ErrorInfo(reason=_DRAINING, domain=_DOMAIN))
    return ()


def retry_after_s(error: grpc.Call | grpc.aio.AioRpcError) -> float | None:
    """The seconds in a failed call; None when it has none, or details that contradict its status."""
    info = error_details_pb2.RetryInfo()
    for detail in _details(error):
        if detail.Unpack(info):
            return info.retry_delay.ToTimedelta().total_seconds()
    return None


def is_draining(error: grpc.Call | grpc.aio.AioRpcError) -> bool:
    """Whether the server ended the call because it is being shut down. False for one that died, or an older version."""
    info = error_details_pb2.ErrorInfo()
    return any(detail.Unpack(info) and (info.reason, info.domain) == (_DRAINING, _DOMAIN) for detail in _details(error))


def _metadata(code: grpc.StatusCode, message: str, info: Message) -> tuple[tuple[str, bytes], ...]:
    detail = Any()
    detail.Pack(info)
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=message, details=[detail])
    return ((DETAILS_KEY, status.SerializeToString()),)


def _details(error: grpc.Call | grpc.aio.AioRpcError) -> Sequence[Any]:
    try:
        status = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType]  # asyncio's has all that it reads
    except ValueError:  # details that contradict the status, from a server of another kind
        return ()
    return () if status is None else status.details
