"""A port for pages of other servers: threads for its calls, and certificates of both sides.

Whoever calls is trusted with all pages, so it shows a certificate, or is on this machine. A thread may hang in a file
system, or in a connection: it must not hold up the end of the process.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import grpc

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
