"""The values that an engine replica and the ingress exchange through Ray, beside the answer itself.

They are values and not exceptions: Ray wraps exceptions in classes of its own and logs them as defects of the
deployment, and a full queue is no defect.
"""

import dataclasses

from jaxserve.errors import JaxserveError, Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The first item of a stream, before anything is computed: `replica` is whose stream it is."""

    replica: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The last item of a stream that ends without an answer; `text` is what the client may read. `drained`: the replica
    is being shut down, and has not failed."""

    status: Status
    text: str
    drained: bool = False


class CallFailed(JaxserveError):
    """Ends a call. Ray's proxy takes code and text from the gRPC context; this is what it logs."""
