"""The time after which to try again, as gRPC carries it: `google.rpc.RetryInfo` in the details of a status.

Both directions are here, so that server, router and client agree. The estimate is made in `engine.waiting`.
"""

import datetime

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DETAILS_KEY = "grpc-status-details-bin"


def retry_metadata(code: grpc.StatusCode, message: str, retry_after_s: float) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for a call that ends with `code` and `message`."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromTimedelta(datetime.timedelta(seconds=retry_after_s))
    detail = Any()
    detail.Pack(info)
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=message, details=[detail])
    return ((DETAILS_KEY, status.SerializeToString()),)


def retry_after_s(error: grpc.Call | grpc.aio.AioRpcError) -> float | None:
    """The seconds in a failed call; None when it has none, or details that contradict its status."""
    try:
        status = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType]  # asyncio's has all that it reads
    except ValueError:  # details that contradict the status, from a server of another kind
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.ToTimedelta().total_seconds()
    return None
