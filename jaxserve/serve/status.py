"""One table from `errors.Status` to the codes of each protocol.

The text that leaves the server with a code is chosen here too. It is one table for all doors, since two doors that
disagree about what may be tried again would mislead every load balancer before them.
"""

from collections.abc import Callable

import grpc

from jaxserve.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidRequest,
    JaxserveError,
    NotFinite,
    QueueFull,
    RequestQuarantined,
    Status,
    UnknownModel,
)

GRPC_CODES: dict[Status, grpc.StatusCode] = {
    Status.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Status.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Status.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Status.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Status.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Status.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Status.QUARANTINED: grpc.StatusCode.FAILED_PRECONDITION,
    Status.INTERNAL: grpc.StatusCode.INTERNAL,
}

HTTP_CODES: dict[Status, int] = {
    Status.INVALID: 400,
    Status.NOT_FOUND: 404,
    Status.UNAUTHENTICATED: 401,
    Status.OVERLOADED: 429,
    Status.UNAVAILABLE: 503,
    Status.DEADLINE: 408,
    Status.QUARANTINED: 422,
    Status.INTERNAL: 500,
}

# A status travels in a trailer, percent-encoded (up to three bytes for each), and clients take 8 KiB of trailers.
_MAX_MESSAGE_BYTES = 2000


_DEFECT = "internal error; the server's log has the details under "


def public_message(error: Exception, where: str) -> str:
    """The part of `error` that a client may read: all of a typed error; of a defect only where to look for it, and of
    numbers that are not finite both, since they may be those of an adapter that the client has chosen."""
    text = str(error)
    if isinstance(error, NotFinite):
        text = f"{_DEFECT}{where}: {text}"
    elif not isinstance(error, JaxserveError) or error.status is Status.INTERNAL:
        return f"{_DEFECT}{where}"
    encoded = text.encode("utf-8", errors="replace")
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + " … (shortened)"


def status_of(error: Exception) -> Status:
    """The status of a typed error; INTERNAL for everything else."""
    return error.status if isinstance(error, JaxserveError) else Status.INTERNAL


_ERRORS: dict[Status, Callable[[str], JaxserveError]] = {
    Status.INVALID: InvalidRequest,
    Status.NOT_FOUND: UnknownModel,
    Status.OVERLOADED: QueueFull,
    Status.UNAVAILABLE: EngineStopped,
    Status.DEADLINE: DeadlineExceeded,
    Status.QUARANTINED: RequestQuarantined,
}


def error_of_grpc(code: grpc.StatusCode, text: str) -> JaxserveError:
    """The typed error of a call that another server has refused.

    What only the caller of that server can mend, such as a token that it does not take, is a defect here.
    """
    status = status_of_grpc(code)
    return _ERRORS[status](text) if status in _ERRORS else JaxserveError(f"a server answers {code.name}: {text}")


def status_of_call(code: grpc.StatusCode, text: str) -> Status:
    """The status of a failed call, for clients.

    INTERNAL without the text of a server's own defect comes from what stands between: gRPC says so of a stream that a
    gateway resets, and Ray's proxy of one whose ingress has died. The server is gone, then.
    """
    if code is grpc.StatusCode.INTERNAL and _DEFECT not in text:
        return Status.UNAVAILABLE
    return status_of_grpc(code)


def status_of_grpc(code: grpc.StatusCode) -> Status:
    """The status of a gRPC code, for clients. A code that no status has counts as INTERNAL."""
    return next((status for status, known in GRPC_CODES.items() if known is code), Status.INTERNAL)
