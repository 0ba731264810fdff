"""The health service's name `live`: what a liveness probe asks, on the real server with a steerable runner."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serve_parts import LONG, WAIT_S, Served, connect, serve_bytes, serve_slowly, served, stall, wait_until

from jaxserve import cli
from jaxserve.api import SamplingParams
from jaxserve.client import RequestFailed
from jaxserve.serve.grpc_server import LIVE_NAME, SERVICE_NAME
from jaxserve.testing import ManualClock

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SHORT = SamplingParams(temperature=0.0, max_tokens=5)


@contextlib.contextmanager
def _watch(server: Served) -> Iterator[Iterator[int]]:
    with grpc.insecure_channel(server.address) as channel:
        request = health_pb2.HealthCheckRequest(service=LIVE_NAME)
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the package has no types
        call = stub.Watch(request, timeout=WAIT_S)
        try:
            yield (reply.status for reply in call)
        finally:
            call.cancel()


def test_a_server_that_drains_is_not_ready_but_live() -> None:
    with served(serve_bytes()) as server, connect(server) as client:
        assert all(client.is_serving(name, timeout_s=WAIT_S) for name in ("", SERVICE_NAME, LIVE_NAME))
        server.runner.hold(after=4)
        running = client.generate("a", SamplingParams(temperature=0.0, max_tokens=500), timeout_s=WAIT_S)
        next(running)
        server.request_shutdown()
        wait_until(lambda: not client.is_serving(timeout_s=WAIT_S), "readiness turns red")
        assert not client.is_serving(SERVICE_NAME, timeout_s=WAIT_S)
        assert client.is_serving(LIVE_NAME, timeout_s=WAIT_S)
        server.runner.release()
        assert len(list(running)) == 499


def test_readiness_is_red_while_a_step_does_not_end() -> None:
    """Liveness stays, since the step may end yet; and the stream goes on when it does."""
    clock = ManualClock()
    with (
        served(serve_bytes(clock=clock, deadline_s=3.0)) as server,
        connect(server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        server.runner.hold()
        answer = pool.submit(client.complete, "a", SHORT, timeout_s=WAIT_S)
        stall(server, clock, lambda: server.engine.red)
        wait_until(lambda: not client.is_serving(timeout_s=WAIT_S), "readiness turns red")
        assert client.is_serving(LIVE_NAME, timeout_s=WAIT_S)
        server.runner.release()
        assert answer.result().num_generated_tokens == 5
        wait_until(lambda: client.is_serving(timeout_s=WAIT_S), "readiness comes back")


def test_an_engine_without_work_never_stalls() -> None:
    clock = ManualClock()
    with served(serve_bytes(clock=clock, deadline_s=3.0)) as server, connect(server) as client:
        for _ in range(3):
            client.complete("a", SHORT, timeout_s=WAIT_S)
            wait_until(server.engine._idle.is_set, "idle")
            for _ in range(10):
                clock.advance(1.0)
                server.engine._watchdog.look()  # pyright: ignore[reportOptionalMemberAccess]
            assert not server.engine.red
            with _watch(server) as watch:
                assert next(watch) == SERVING


def test_a_dead_engine_is_not_live() -> None:
    with served(serve_slowly()) as server, connect(server) as client, _watch(server) as watch:
        assert next(watch) == SERVING
        server.runner.broken = True
        with pytest.raises(RequestFailed, match="engine has died"):
            client.complete("a", LONG, timeout_s=WAIT_S)
        assert next(watch) == NOT_SERVING
        assert server.wait_for_exit() == 1


def test_the_health_command(capsys: pytest.CaptureFixture[str]) -> None:
    patient = ["--timeout", str(WAIT_S)]
    with served(serve_bytes()) as server:
        capsys.readouterr()  # the server, in this process, has said where it listens
        assert cli.main(["health", server.address, *patient]) == 0
        assert cli.main(["health", server.address, "--service", LIVE_NAME, *patient]) == 0
        assert cli.main(["health", server.address, "--service", "nobody", *patient]) == 1
    assert cli.main(["health", server.address, "--timeout", "1"]) == 1
    serving, live, unknown, gone = capsys.readouterr().out.splitlines()
    assert (serving, live) == ("SERVING", "SERVING")
    assert unknown.startswith(f"ERROR from {server.address}: ")
    assert gone.startswith(f"NO_ANSWER from {server.address}: ")
