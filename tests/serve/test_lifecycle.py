"""What happens when somebody leaves: clients, deadlines, the engine, the operator."""

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from serve_parts import (
    LONG,
    LONG_TOKENS,
    ONE_CALL,
    WAIT_S,
    Served,
    connect,
    lines_told,
    serve_bytes,
    serve_slowly,
    served,
    wait_until,
)

from jaxserve.api import SamplingParams
from jaxserve.client import AsyncClient, Client, RequestFailed
from jaxserve.config.schema import GrpcConfig, ServeConfig
from jaxserve.errors import ConfigError, Status
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.grpc_server import LIVE_NAME, SERVICE_NAME
from jaxserve.serve.service import Shutdown, check_serve_config, serve

SHORT = SamplingParams(temperature=0.0, max_tokens=5)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def server() -> Iterator[Served]:
    with served(serve_slowly(max_rows=4)) as parts:
        yield parts
    parts.scheduler.check()  # once its loop has ended


def assert_all_free(server: Served) -> None:
    """Rows, pages and requests are given back, and not because the request ran to its end."""
    wait_until(lambda: not server.scheduler.has_work() and server.scheduler.num_held_pages == 0, "pages are free")
    assert server.runner.inner.num_steps < LONG_TOKENS
    assert server.engine.num_live == 0
    assert server.scheduler.num_running == server.scheduler.num_waiting == 0


# ---- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_the_iterator_frees_the_pages(server: Served, n: int) -> None:
    with connect(server) as client:
        replies = client.generate("a", dataclasses.replace(LONG, n=n), timeout_s=WAIT_S)
        for _ in range(4 * n):
            next(replies)
        assert server.scheduler.num_held_pages > 0
        replies.close()
        assert_all_free(server)
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef"


def test_a_cancel_is_seen_within_a_step(server: Served) -> None:
    """While a step is held the abort waits in the inbox; the turn after it ends must already have freed the pages."""
    with connect(server) as client:
        replies = client.generate("a", LONG, timeout_s=WAIT_S)
        next(replies)
        server.runner.hold()
        wait_until(lambda: server.runner.is_held, "the loop waits in a step")
        steps = server.runner.inner.num_steps
        replies.close()
        wait_until(lambda: not server.engine._inbox.empty(), "the abort is in the inbox")
        server.runner.release()
        assert_all_free(server)
        assert server.runner.inner.num_steps - steps <= 1


def test_a_request_that_waits_can_be_cancelled(server: Served) -> None:
    with connect(server) as client, contextlib.ExitStack() as stack:
        for _ in range(4):
            running = client.generate("a", LONG, timeout_s=WAIT_S)
            stack.callback(running.close)
            next(running)
        call = _call(stack, server)
        wait_until(lambda: server.scheduler.num_waiting == 1, "the fifth waits for a row")
        call.cancel()
        wait_until(lambda: server.scheduler.num_waiting == 0, "it has left the queue")
        assert server.scheduler.num_running == 4


def test_a_deadline_ends_the_request(server: Served) -> None:
    with connect(server) as client:
        with pytest.raises(RequestFailed) as caught:
            client.complete("a", LONG, timeout_s=0.5)
        assert caught.value.status is Status.DEADLINE
        assert_all_free(server)


CLIENT = """
import sys
from jaxserve.api import SamplingParams
from jaxserve.client import Client
for reply in Client(sys.argv[1]).generate("a", SamplingParams(temperature=0.0, max_tokens=int(sys.argv[2]))):
    print(reply.text, flush=True)
"""


@contextlib.contextmanager
def _client_process(server: Served) -> Iterator[subprocess.Popen[bytes]]:
    """Another process in the middle of a long answer."""
    command = [sys.executable, "-c", CLIENT, server.address, str(LONG_TOKENS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_client_that_is_killed_frees_its_pages(server: Served) -> None:
    with _client_process(server) as process:
        assert server.scheduler.num_held_pages > 0
        process.kill()
        process.wait(WAIT_S)
        assert_all_free(server)


@pytest.mark.slow
def test_a_client_that_falls_silent_is_found_by_pings() -> None:
    """A stopped process stands for a cut cable: its kernel keeps the connection, and nobody answers.

    A client that a busy machine keeps from answering pings, before it is stopped, is lost by the same way.
    """
    config = GrpcConfig(port=0, keepalive_s=1.0, keepalive_timeout_s=3.0)
    with served(serve_slowly(), grpc_config=config) as server, _client_process(server) as process:
        process.send_signal(signal.SIGSTOP)
        assert_all_free(server)


async def test_many_clients_leave_at_once(server: Served) -> None:
    async with AsyncClient(server.address) as client:

        async def leave_early(index: int) -> None:
            sampling = dataclasses.replace(LONG, n=1 + index % 2)
            replies = client.generate([index], sampling, timeout_s=WAIT_S)
            async with contextlib.aclosing(replies):
                async for _ in replies:
                    return

        async def be_cancelled(index: int) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.complete([index], LONG, timeout_s=WAIT_S), 0.002 * index)

        await asyncio.wait_for(
            asyncio.gather(*(leave_early(i) for i in range(30)), *(be_cancelled(i) for i in range(30))), WAIT_S
        )
        wait_until(lambda: not server.scheduler.has_work(), "all have left")
        assert server.scheduler.num_held_pages == 0
        assert (await client.complete("a", SHORT, timeout_s=WAIT_S)).text == "bcdef"


# ---- too many --------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_resource_exhausted() -> None:
    with served(serve_bytes(max_rows=1, max_waiting=2)) as server, connect(server) as client:
        server.runner.hold()
        with contextlib.ExitStack() as stack:
            calls = [_call(stack, server) for _ in range(2)]
            wait_until(lambda: server.engine.num_unstarted == 2, "two requests wait")
            with pytest.raises(RequestFailed, match=r"sched\.max_waiting is 2") as caught:
                client.complete("a", SHORT, timeout_s=WAIT_S)
            assert caught.value.status is Status.OVERLOADED
            server.runner.release()
            assert len(calls) == 2
        wait_until(lambda: server.engine.num_unstarted == 0, "both have left")
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef"


def test_the_queue_is_bounded_in_sequences() -> None:
    with served(serve_bytes(max_rows=1, max_waiting=200)) as server, connect(server) as client:
        for n, setting in ((129, r"serve\.max_n"), (1024, r"serve\.max_n")):
            with pytest.raises(RequestFailed, match=setting) as caught:
                client.complete("a", SamplingParams(n=n, max_tokens=1), timeout_s=WAIT_S)
            assert caught.value.status is Status.INVALID
        server.runner.hold()
        with contextlib.ExitStack() as stack:
            _call(stack, server)
            wait_until(lambda: server.engine.num_unstarted == 1, "one request waits")
            _call(stack, server, n=100)
            wait_until(lambda: client.load().num_waiting == 101, "two requests with 101 sequences wait")
            with pytest.raises(
                RequestFailed, match="101 sequences are waiting, 101 of them yours, and 100 more"
            ) as caught:
                client.complete("a", SamplingParams(n=100, max_tokens=1), timeout_s=WAIT_S)
            assert caught.value.status is Status.OVERLOADED
            assert server.engine.num_unstarted == 2
            server.runner.release()


# ---- health and reflection -------------------------------------------------------------------------------------------


def test_health_and_reflection(server: Served) -> None:
    with grpc.insecure_channel(server.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)  # the package has no types
        for name in ("", SERVICE_NAME):
            assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
        ]
        listed, file = reflection.ServerReflectionInfo(iter(requests), timeout=WAIT_S)
    assert SERVICE_NAME == "jaxserve.v1.Inference"
    assert {s.name for s in listed.list_services_response.service} == {
        SERVICE_NAME,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert file.file_descriptor_response.file_descriptor_proto == [pb.DESCRIPTOR.serialized_pb]


def test_the_client_asks_for_health() -> None:
    with served(serve_bytes()) as server, connect(server) as client:
        assert client.is_serving(timeout_s=WAIT_S, wait_for_ready=True)
        server.request_shutdown()
        server.wait_for_exit()
        assert not client.is_serving(timeout_s=1.0)


# ---- the engine dies -------------------------------------------------------------------------------------------------


def test_a_dead_engine_turns_health_red_and_ends_every_stream() -> None:
    with served(serve_slowly()) as server, connect(server) as client, contextlib.ExitStack() as stack:
        watch = _watch_health(stack, server)
        assert next(watch) == SERVING
        streams = [client.generate([i], LONG, timeout_s=WAIT_S) for i in range(4)]
        for stream in streams:
            next(stream)
        server.runner.broken = True
        for stream in streams:
            with pytest.raises(RequestFailed, match="engine has died") as caught:
                list(stream)
            assert caught.value.status is Status.UNAVAILABLE
        assert next(watch) == NOT_SERVING
        assert server.wait_for_exit() == 1


def test_a_defect_of_one_request_is_internal_without_its_text(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("/a/path/of/ours")

    with connect(server) as client:
        with monkeypatch.context() as patch:
            patch.setattr(server.engine, "prepare", broken)
            with pytest.raises(RequestFailed, match="internal error") as caught:
                client.complete("a", SHORT, timeout_s=WAIT_S)
        assert caught.value.status is Status.INTERNAL
        assert "path" not in str(caught.value)
        assert "Traceback" not in str(caught.value)
        reference = str(caught.value).rsplit(" ", 1)[1]
        (record,) = [r for r in caplog.records if reference in r.getMessage()]
        assert record.exc_info is not None, "the log has the traceback under the reference that the client got"
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef"


# ---- the operator stops the server -----------------------------------------------------------------------------------


def test_a_drain_lets_running_requests_end_and_refuses_new_ones() -> None:
    with served(serve_bytes()) as server, connect(server) as client, contextlib.ExitStack() as stack:
        watch = _watch_health(stack, server)
        assert next(watch) == SERVING
        server.runner.hold(after=4)
        running = client.generate([1], SamplingParams(temperature=0.0, max_tokens=500), timeout_s=WAIT_S)
        replies = [next(running)]
        server.request_shutdown()
        assert next(watch) == NOT_SERVING
        wait_until(lambda: not server.engine.accepting, "the engine drains")
        with pytest.raises(RequestFailed, match="shutting down") as caught:
            client.complete("a", SHORT, timeout_s=WAIT_S)
        assert caught.value.status is Status.UNAVAILABLE
        server.runner.release()
        replies += running
        assert len(replies) == 500
        assert replies[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert server.wait_for_exit() == 0


def test_what_outlives_the_drain_is_told_that_it_can_go_on_elsewhere() -> None:
    with served(serve_slowly(), drain_s=0.2) as server, connect(server) as client:
        running = client.generate([1], LONG, timeout_s=WAIT_S)
        next(running)
        server.request_shutdown()
        with pytest.raises(RequestFailed, match="shut down before the end of the request") as caught:
            list(running)
        assert caught.value.status is Status.UNAVAILABLE and caught.value.draining
        assert server.wait_for_exit() == 0


SERVER = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which whoever runs the tests may have ignored
sys.path.insert(0, {tests!r})
from serve_parts import WAIT_S, serve_slowly
from jaxserve.config.schema import GrpcConfig, ServeConfig
from jaxserve.serve import shutdown
from jaxserve.serve.service import serve_forever
shutdown._HURRY_S = WAIT_S
parts = serve_slowly(0.01)
code = serve_forever(parts.engine, ServeConfig(drain_s=float(sys.argv[1]), grpc=GrpcConfig(port=0)))
assert not parts.scheduler.has_work() and parts.scheduler.num_held_pages == 0
sys.exit(code)
"""


@contextlib.contextmanager
def _server_process(drain_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    code = SERVER.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", code, str(drain_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving gRPC on 127.0.0.1:"), line
            yield process, line.split()[-1]
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_and_the_process_exits_with_0(number: signal.Signals) -> None:
    with _server_process(drain_s=WAIT_S) as (process, address), Client(address) as client:
        running = client.generate([1], SamplingParams(temperature=0.0, max_tokens=60), timeout_s=WAIT_S)
        replies = [next(running)]
        process.send_signal(number)
        replies += running
        assert replies[-1].finish_reason == pb.FINISH_REASON_LENGTH
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out, lines_told(err)) == (0, "", [])


def test_probes_while_it_drains_and_a_second_signal_that_stops_at_once() -> None:
    with _server_process(drain_s=600.0) as (process, address), Client(address, retries=ONE_CALL) as client:
        running = client.generate([1], LONG, timeout_s=WAIT_S)
        next(running)
        process.send_signal(signal.SIGTERM)
        for _ in range(10):
            assert next(running).finish_reason == 0, "the first signal must not end a request"
        # The probes, as deploy/README.md says: no new requests, and no restart before the running ones have ended.
        wait_until(lambda: not client.check_health(SERVICE_NAME, timeout_s=WAIT_S), "readiness is red")
        assert client.check_health(LIVE_NAME, timeout_s=WAIT_S), "liveness is green"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(RequestFailed, match="shut down before the end"):
            list(running)
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out) == (0, ""), err


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_no_door_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"serve\.grpc\.port"):
        check_serve_config(ServeConfig())


def test_a_port_in_use_is_a_config_error(server: Served) -> None:
    other = serve_bytes()
    port = int(server.address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
        asyncio.run(asyncio.wait_for(serve(other.engine, ServeConfig(grpc=GrpcConfig(port=port)), Shutdown()), WAIT_S))


def test_the_client_loads_nothing_of_the_engine() -> None:
    code = "import sys, jaxserve.client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    names = set(loaded.stdout.split())
    assert not names & {"jax", "numpy", "pydantic", "jaxserve.engine", "jaxserve.sched", "jaxserve.text"}


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _call(stack: contextlib.ExitStack, server: Served, n: int = 1) -> grpc.Call:
    """A long request whose messages nobody reads; cancelled when the block ends."""
    channel = stack.enter_context(grpc.insecure_channel(server.address))
    call = channel.unary_stream("/jaxserve.v1.Inference/Generate")(
        pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=500, n=n)).SerializeToString(),
        timeout=WAIT_S,
    )
    stack.callback(call.cancel)
    return call


def _watch_health(stack: contextlib.ExitStack, server: Served) -> Iterator[int]:
    channel = stack.enter_context(grpc.insecure_channel(server.address))
    stub: Any = health_pb2_grpc.HealthStub(channel)
    call = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=WAIT_S)
    stack.callback(call.cancel)
    return (reply.status for reply in call)
