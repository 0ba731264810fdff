"""Access to the gRPC door by bearer tokens, which `keys` reads; certificates of connections are in `tls`.

Health needs no token, since balancers have none; with TLS it
needs TLS as everything else.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from jaxserve.errors import Unauthenticated
from jaxserve.serve.counts import GRPC, OTHER, DoorCounts, Refusal, reason_of
from jaxserve.serve.grpc_admin import ADMIN_NAMES
from jaxserve.serve.keys import KnownKeys
from jaxserve.serve.status import GRPC_CODES

_OPEN_PREFIX = "/grpc.health.v1.Health/"
_ADMIN_PREFIXES = tuple(f"/{name}/" for name in ADMIN_NAMES)


class BearerTokens(grpc.aio.ServerInterceptor):
    """Refuses calls without `authorization: Bearer TOKEN`, of all methods but health where there are tokens, and of
    those for operators always."""

    def __init__(self, known: KnownKeys | None, admins: KnownKeys | None, counts: DoorCounts) -> None:
        """`known` None: the door is open but for operators' methods, for which `admins` have the tokens."""
        self._known = known
        self._admins = admins

        async def refuse(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            error = Unauthenticated(
                "this server needs a token that it knows; send the metadata 'authorization: Bearer TOKEN'"
            )
            code = GRPC_CODES[error.status]
            counts.note_grpc(OTHER, code.name)
            counts.note_refusal(Refusal(GRPC, reason_of(error), code.name, OTHER, None))
            await context.abort(code, str(error))

        self._refusal = grpc.stream_unary_rpc_method_handler(refuse)  # which reads none of them

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # a grpc.RpcMethodHandler, or None for a method that does not exist
        method = handler_call_details.method
        known = self._admins if self._admins is not None and method.startswith(_ADMIN_PREFIXES) else self._known
        if known is not None and not method.startswith(_OPEN_PREFIX):
            values = [value for key, value in handler_call_details.invocation_metadata if key == "authorization"]
            if len(values) != 1 or not known.accept(str(values[0])):
                return self._refusal
        return await continuation(handler_call_details)
