"""What the tests of the router share: a router on a thread of its own, in front of whatever addresses."""

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_parts import WAIT_S, wait_until

from jaxserve.client import Client
from jaxserve.config.schema import Config, GrpcConfig, HttpConfig, RouteConfig, RuntimeConfig, ServeConfig
from jaxserve.serve.route import Routing, route
from jaxserve.serve.route_pool import Resolve
from jaxserve.serve.shutdown import Shutdown


class Routed:
    """A running router. `exit_code` is there once it has ended."""

    def __init__(self) -> None:
        self.address = self.http_url = ""
        self.exit_code: int | None = None
        self.shutdown: Shutdown
        self.loop: asyncio.AbstractEventLoop
        self.thread: threading.Thread

    def request_shutdown(self) -> None:
        self.loop.call_soon_threadsafe(self.shutdown.request)

    def wait_for_exit(self) -> int | None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "routing does not end"
        return self.exit_code

    def is_healthy(self) -> bool:
        with Client(self.address) as client:
            return client.is_serving(timeout_s=WAIT_S)


@contextlib.contextmanager
def routed(
    *replicas: str,
    policy: str = "least_load",
    retries: int = 2,
    drain_s: float = WAIT_S,
    wait_s: float = 0.5,
    resolve: Resolve | None = None,
    wait: bool = True,
    access: Mapping[str, Any] = {},
    http: HttpConfig = HttpConfig(),  # noqa: B008
    tokens_file: str | None = None,
    log_requests: bool = False,
) -> Iterator[Routed]:
    """Routes until the block ends; `wait` until a replica is well. `access`: fields of RouteConfig."""
    router, ready = Routed(), threading.Event()
    config = Config(
        runtime=RuntimeConfig(log_requests=log_requests),
        serve=ServeConfig(drain_s=drain_s, grpc=GrpcConfig(port=0, tokens_file=tokens_file), http=http),
        route=RouteConfig(
            replicas=list(replicas),
            policy=policy,
            retries=retries,
            wait_s=wait_s,
            health_interval_s=0.05,
            health_timeout_s=WAIT_S,
            dns_interval_s=0.05,
            **access,
        ),
    )

    async def main() -> int:
        router.loop = asyncio.get_running_loop()
        router.shutdown = Shutdown()
        return await route(config, router.shutdown, on_ready, resolve=resolve)

    def on_ready(routing: Routing) -> None:
        router.address = routing.grpc
        router.http_url = f"http://{routing.http}"
        ready.set()

    def run() -> None:
        try:
            router.exit_code = asyncio.run(main())
        finally:
            ready.set()

    router.thread = threading.Thread(target=run, name="test-router", daemon=True)
    router.thread.start()
    try:
        assert ready.wait(WAIT_S), "the router does not start"
        if wait:
            wait_until(router.is_healthy, "a replica is well")
        yield router
    finally:
        with contextlib.suppress(RuntimeError):  # it may have ended by itself, and closed its loop
            router.request_shutdown()
            router.request_shutdown()
        router.wait_for_exit()


_SERVER = """
import sys
sys.path.insert(0, {tests!r})
from serve_parts import Served, serve_slowly
from jaxserve.config.schema import GrpcConfig, ServeConfig
from jaxserve.config.model_path import resolve_model_path
from jaxserve.serve.service import serve_forever
from jaxserve.text import load_tokenizer
if {demo}:
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    sizes = dict(vocab_size=tokenizer.vocab_size, max_model_len=4096, num_pages=2048, max_rows={max_rows})
    parts = Served(tokenizer=tokenizer, mode="context", delay_s={delay_s}, **sizes)
else:
    parts = serve_slowly({delay_s}, max_rows={max_rows})
sys.exit(serve_forever(parts.engine, ServeConfig(drain_s={drain_s}, grpc=GrpcConfig(port={port}))))
"""


@contextlib.contextmanager
def fake_server(
    *,
    delay_s: float = 0.0,
    port: int = 0,
    max_rows: int = 4,
    life_s: float = 4 * WAIT_S,
    drain_s: float = 30.0,
    demo: bool = False,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on the fake device in a process of its own, and its address. Killed when the block ends.

    `demo`: it has the tokenizer of the demo model, and each token depends on all before it.
    """
    code = _SERVER.format(
        tests=str(Path(__file__).parent), delay_s=delay_s, port=port, max_rows=max_rows, drain_s=drain_s, demo=demo
    )
    with server_process([sys.executable, "-c", code], life_s) as started:
        yield started


@contextlib.contextmanager
def server_process(command: Sequence[str], life_s: float = 4 * WAIT_S) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Any process that prints its address as the last word of its first line. It is killed after `life_s` at most."""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        watchdog = threading.Timer(life_s, process.kill)  # so that reading its first line cannot wait for ever
        watchdog.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "gRPC on 127.0.0.1:" not in line:
                process.kill()
                log.seek(0)
                raise AssertionError(f"it did not start: {line!r}, {log.read()[-4000:]}")
            yield process, line.split()[-1]
        finally:
            watchdog.cancel()
            process.kill()
