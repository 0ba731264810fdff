"""Who may open a gRPC connection, and who may call: certificates and bearer tokens.

Owns the check of both and the reading of the files, at start: a certificate that does not load must stop the server and
not its first client. Health needs no token, since balancers have none; with TLS it needs TLS as everything else.
"""

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from jaxserve.config_schema import GrpcConfig
from jaxserve.errors import ConfigError, Unauthenticated
from jaxserve.serve.keys import KnownKeys
from jaxserve.serve.status import GRPC_CODES

_OPEN_PREFIX = "/grpc.health.v1.Health/"


class BearerTokens(grpc.aio.ServerInterceptor):
    """Refuses calls without `authorization: Bearer TOKEN`, whatever the method, but for health."""

    def __init__(self, known: KnownKeys) -> None:
        self._known = known

        async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
            error = Unauthenticated(
                "this server needs a token that it knows; send the metadata 'authorization: Bearer TOKEN'"
            )
            await context.abort(GRPC_CODES[error.status], str(error))

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # a grpc.RpcMethodHandler, or None for a method that does not exist
        if not handler_call_details.method.startswith(_OPEN_PREFIX):
            values = [value for key, value in handler_call_details.invocation_metadata if key == "authorization"]
            if len(values) != 1 or not self._known.accept(str(values[0])):
                return self._refusal
        return await continuation(handler_call_details)


def server_credentials(config: GrpcConfig) -> grpc.ServerCredentials | None:
    """None for a server in the clear. Raises ConfigError when a file is missing or is no certificate."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # gRPC itself would only log what is wrong, and refuse every client
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")
        authorities = None
        if config.tls_client_ca is not None:
            context.load_verify_locations(config.tls_client_ca)
            authorities = Path(config.tls_client_ca).read_bytes()
        pair = (Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes())
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"serve.grpc.tls_cert ({config.tls_cert}), tls_key and tls_client_ca must be PEM files that belong "
            f"together: {error}"
        ) from error
    return grpc.ssl_server_credentials(
        [pair], root_certificates=authorities, require_client_auth=authorities is not None
    )


def check_access(config: GrpcConfig) -> None:
    """Raises ConfigError for settings that contradict each other."""
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("serve.grpc.tls_cert and serve.grpc.tls_key go together; set both, or none")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("serve.grpc.tls_client_ca asks clients for certificates, which needs serve.grpc.tls_cert")
