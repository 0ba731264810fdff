"""A port for pages of other servers: threads for its calls, and certificates of both sides.

Whoever calls is trusted with all pages, so it shows a certificate, or is on this machine. A thread may hang in a file
system, or in a connection: it must not hold up the end of the process.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from jaxserve.config.addresses import is_loopback
from jaxserve.errors import ConfigError
from jaxserve.kv.workers import Workers
from jaxserve.serve.tls import Certificates, TlsFiles

PORT_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

T = TypeVar("T")


class DecodedMessages(grpc.ServerInterceptor):
    """Answers a message that cannot be decoded with INVALID_ARGUMENT, as the doors do. gRPC itself would say INTERNAL,
    and write a traceback to the log."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # a grpc.RpcMethodHandler, or None for a method that does not exist
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        assert not handler.request_streaming, f"{handler_call_details.method} streams requests; wrap that kind too"
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        parse = handler.request_deserializer

        def call(raw: bytes, context: grpc.ServicerContext) -> Any:
            try:
                request = parse(raw)
            except DecodeError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message cannot be decoded: {error}")
                raise AssertionError("abort raises") from error
            return behaviour(request, context)

        wrap = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return wrap(call, request_deserializer=None, response_serializer=handler.response_serializer)


def call_threads(name: str, threads: int, max_calls: int) -> Any:  # the stubs of gRPC ask for a ThreadPoolExecutor
    """An executor for `grpc.server`, which bounds its calls by `max_calls`."""
    return _Pool(Workers(name, threads, max_calls))


class _Pool(Executor):
    """Threads for gRPC that may be left behind: a process waits for those of a ThreadPoolExecutor before it ends."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """See `Executor`."""
        future: Future[T] = Future()
        accepted = self._workers.submit(functools.partial(_run, future, functools.partial(fn, *args, **kwargs)))
        assert accepted, "gRPC bounds the calls at once"
        return future


def _run(future: "Future[T]", call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def mutual_credentials(
    files: TlsFiles, section: str, host: str, callers: str, authorities: str = "tls_client_ca"
) -> grpc.ServerCredentials | None:
    """None: there is no TLS, and nobody but this machine reaches `host`. Raises ConfigError.

    `section` names the settings in errors, `callers` those who must show a certificate, `authorities` the setting of
    the files that they are checked by.
    """
    certificates = Certificates.of(files, section)
    if (certificates is None or not certificates.asks_clients) and not is_loopback(host):
        raise ConfigError(
            f"{section}.host is {host}, which other machines reach, so {callers} must show a certificate: set "
            f"{section}.tls_cert, tls_key and {authorities}, or listen on 127.0.0.1"
        )
    return None if certificates is None else certificates.grpc_credentials()
