"""Channels to the ports of pages: of a page server, and of the servers that hand prompts over."""

from collections.abc import Iterable

import grpc

_RECONNECT_MS = 2000  # gRPC itself would wait up to two minutes between two attempts to connect


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    tls_name: str | None,
    max_message_bytes: int,
    options: Iterable[tuple[str, int | str]] = (),
) -> grpc.Channel:
    """A channel that connects with its first call, and soon again when that was lost.

    Args:
      address: HOST:PORT.
      credentials: of mutual TLS; None: without TLS.
      tls_name: the name in the certificate of the other side, if it is not its address.
      max_message_bytes: longest message that is received.
      options: more of them, which win over these.
    """
    chosen: dict[str, int | str] = {
        "grpc.max_receive_message_length": max_message_bytes,
        "grpc.initial_reconnect_backoff_ms": _RECONNECT_MS // 4,
        "grpc.max_reconnect_backoff_ms": _RECONNECT_MS,
    }
    if tls_name is not None:
        chosen["grpc.ssl_target_name_override"] = tls_name
    chosen.update(options)
    if credentials is None:
        return grpc.insecure_channel(address, options=list(chosen.items()))
    return grpc.secure_channel(address, credentials, options=list(chosen.items()))
