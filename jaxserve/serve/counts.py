"""Counts of the doors' answers: calls by their outcome, refusals by their reason. `metrics` shows them.

The names of reasons are a closed list, and methods, routes and codes are those of the server, never those that a client
makes up: so the number of series is bounded.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping

from jaxserve.engine.histogram import Histogram
from jaxserve.errors import (
    AdapterMemoryFull,
    ChangeUnderWay,
    DeadlineExceeded,
    EngineStopped,
    InvalidRequest,
    JaxserveError,
    MessagesFull,
    PromptTooLong,
    QueueFull,
    RequestRejected,
    TenantLimited,
    Unauthenticated,
    UnknownModel,
    UnsupportedOption,
    UserError,
)
from jaxserve.kv.store import StoreUnavailable
from jaxserve.serve.handoff import HandoffCounts

OTHER = "other"  # stands for every method and route that this server does not have
HTTP, GRPC = "http", "grpc"
_INTERNAL = "internal_error"
_HTTP_SECONDS = (0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_REASONS: Mapping[type[JaxserveError], str] = {
    UserError: "invalid_request",
    InvalidRequest: "invalid_request",
    UnsupportedOption: "unsupported_option",
    PromptTooLong: "prompt_too_long",
    RequestRejected: "request_rejected",
    QueueFull: "queue_full",
    MessagesFull: "messages_full",
    ChangeUnderWay: "busy",
    UnknownModel: "not_found",
    AdapterMemoryFull: "adapter_memory_full",
    Unauthenticated: "unauthenticated",
    DeadlineExceeded: "deadline_exceeded",
    EngineStopped: "engine_stopped",
    StoreUnavailable: "store_unavailable",
}

# Refusals that only HTTP has, by status. A status that is not here counts as a wrong request.
HTTP_REASONS: Mapping[int, str] = {
    400: "invalid_request",
    403: "unknown_host",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "busy",
    413: "body_too_large",
    414: "url_too_long",
    415: "media_type",
    429: "too_many_views",
    431: "headers_too_large",
    500: _INTERNAL,
    503: "too_many_connections",
    507: "disk_full",
}


_TENANT_REASONS = ("tenant_requests", "tenant_tokens", "tenant_concurrent_tokens")  # by `TenantLimited.limit`


def reason_of(error: Exception) -> str:
    """The name of a refusal; an error that is not typed counts as a defect."""
    if isinstance(error, TenantLimited):
        return f"tenant_{error.limit}"
    return next((_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS), _INTERNAL)


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A call that was refused or has failed: nothing in it is of a caller's making but `call_id`.

    Attributes:
      door: HTTP or GRPC.
      status: the number or the name that the caller got. Of a stream that failed in its middle, that of its beginning.
      route: as in the metrics.
      call_id: visible ASCII of at most 256 characters; None: the call has none.
    """

    door: str
    reason: str
    status: str
    route: str
    call_id: str | None


class DoorCounts:
    """Mutated on the event loop of the doors, `note_ignored` on any thread, `note_slow` on the one of the loop's watch;
    any thread may copy the dictionaries, which is one operation.

    Attributes:
      http: answers by method, route and status.
      grpc: calls by method and code.
      http_seconds: how long the answers took, by method and route, from the first such call on.
      refused: by door and reason. All are here from the start: a rate needs the zero before the first.
      ignored: fields of requests that were ignored, by route, place and name (`http.marks`).
      slow: times that the event loop was held up, by function (`loop_watch`).
      degraded: why the process is degraded (`serve.degraded`), written by who watches it; None: it is not.
      on_refusal: hears of each refusal, on the event loop of the doors. Set before the doors open.
      read_handoff: reads the counts of handoffs; None where there are none. Set before the doors open.
    """

    def __init__(self) -> None:
        self.degraded: str | None = None
        self.read_handoff: Callable[[], HandoffCounts] | None = None
        self.on_refusal: Callable[[Refusal], None] | None = None
        self.http: dict[tuple[str, str, str], int] = {}
        self.http_seconds: dict[tuple[str, str], Histogram] = {}
        self.grpc: dict[tuple[str, str], int] = {}
        self.ignored: dict[tuple[str, str, str], int] = {}
        self.slow: dict[str, int] = {}
        self._ignored_names: set[tuple[str, str]] = set()
        self._ignored_lock = threading.Lock()
        both = {*_REASONS.values(), *_TENANT_REASONS, _INTERNAL}
        self.refused = {(GRPC, reason): 0 for reason in sorted(both)}
        self.refused |= {(HTTP, reason): 0 for reason in sorted(both.union(HTTP_REASONS.values()))}

    def note_http(self, method: str, route: str, status: int, seconds: float | None = None) -> None:
        """One answer has ended, after `seconds`; None: there never was a call, only bytes.

        499: the client had left before the answer began.
        """
        key = (method, route, str(status))
        self.http[key] = self.http.get(key, 0) + 1
        if seconds is not None:
            if (histogram := self.http_seconds.get((method, route))) is None:
                histogram = self.http_seconds[method, route] = Histogram(_HTTP_SECONDS)
            histogram.add(seconds)

    def note_grpc(self, method: str, code: str) -> None:
        """One call has ended."""
        key = (method, code)
        self.grpc[key] = self.grpc.get(key, 0) + 1

    def note_refusal(self, refusal: Refusal) -> None:
        """A call was refused or has failed."""
        self.refused[refusal.door, refusal.reason] += 1
        if self.on_refusal is not None:
            self.on_refusal(refusal)

    def note_slow(self, where: str) -> None:
        """The event loop was held up. `where` is of a bounded list."""
        self.slow[where] = self.slow.get(where, 0) + 1

    def note_ignored(self, route: str, place: str, name: str) -> bool:
        """A field of a request was ignored. `name` is of a closed list. True for the first of it at this place."""
        with self._ignored_lock:
            key = (route, place, name)
            self.ignored[key] = self.ignored.get(key, 0) + 1
            is_new = (place, name) not in self._ignored_names
            self._ignored_names.add((place, name))
            return is_new
