"""The end of a service whose clients do not read, or whose device does not answer: told, and over in time."""

import contextlib
import time
from collections.abc import Iterator

import grpc
import pytest
from route_parts import routed
from serve_parts import LONG, WAIT_S, Served, connect, serve_bytes, serve_slowly, served, stall, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import RequestFailed
from jaxserve.errors import Status
from jaxserve.serve import route, service, shutdown
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.service import HUNG
from jaxserve.testing import ManualClock

NUM_TOKENS = 8 * 400


@contextlib.contextmanager
def _unread(address: str) -> Iterator[Iterator[pb.GenerateResponse]]:
    """An answer of more bytes than a connection holds on its way, and nobody who reads it."""
    sampling = pb.SamplingParams(temperature=0.0, n=8, max_tokens=400, logprobs=20, ignore_eos=True)
    small = (("grpc.http2.lookahead_bytes", 2**14), ("grpc.http2.bdp_probe", 0))  # else megabytes are on their way
    with grpc.insecure_channel(address, options=small) as channel:
        call = pb_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7]), sampling=sampling), timeout=2 * WAIT_S
        )
        try:
            yield call
        finally:
            call.cancel()


def _computed(server: Served) -> bool:
    return server.runner.inner.num_steps > 0 and not server.scheduler.has_work()


@pytest.mark.slow
def test_a_client_that_never_reads_does_not_keep_a_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "_FAREWELL_S", 0.2)
    with served(serve_bytes(), drain_s=0.5) as server, _unread(server.address):
        wait_until(lambda: _computed(server), "the engine is done with it")
        server.request_shutdown()
        assert server.wait_for_exit() == 0
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_leaves_unread_messages_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    with served(serve_bytes()) as server:
        with _unread(server.address):
            wait_until(lambda: _computed(server), "the engine is done with it")
        with connect(server) as client:
            assert client.complete("a", SamplingParams(temperature=0.0, max_tokens=5), timeout_s=WAIT_S).text == "bcdef"
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_second_signal_does_not_wait_for_a_client_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_HURRY_S", 0.1)
    monkeypatch.setattr(service, "_FAREWELL_S", 4 * WAIT_S)
    with served(serve_bytes(), drain_s=4 * WAIT_S) as server, _unread(server.address):
        wait_until(lambda: _computed(server), "the engine is done with it")
        server.request_shutdown()
        wait_until(lambda: not server.engine.accepting, "it drains")
        server.request_shutdown()
        assert server.wait_for_exit() == 0


def test_a_client_that_reads_slowly_has_all_of_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_FAREWELL_S", 0.0)
    with served(serve_bytes(), drain_s=WAIT_S) as server, _unread(server.address) as replies:
        wait_until(lambda: _computed(server), "the engine is done with it")
        server.request_shutdown()
        wait_until(lambda: server.engine._stop_now.is_set(), "the engine has stopped")
        time.sleep(0.5)  # longer than the port lingers
        assert sum(len(reply.token_ids) for reply in replies) == NUM_TOKENS
        assert server.wait_for_exit() == 0


def test_a_second_signal_ends_a_router_before_a_client_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_HURRY_S", 0.1)
    monkeypatch.setattr(route, "_FAREWELL_S", 4 * WAIT_S)
    with (
        served(serve_bytes()) as server,
        routed(server.address, drain_s=4 * WAIT_S) as router,
        _unread(router.address),
    ):
        wait_until(lambda: _computed(server), "the engine is done with it")
        router.request_shutdown()
        router.request_shutdown()
        assert router.wait_for_exit() == 0


def test_a_device_that_stands_still_in_a_drain_is_told() -> None:
    """Readiness is red already; the streams must not hang, and the process ends."""
    clock = ManualClock()
    with served(serve_slowly(clock=clock, deadline_s=3.0), drain_s=4 * WAIT_S) as server, connect(server) as client:
        running = client.generate("a", LONG, timeout_s=WAIT_S)
        next(running)
        server.request_shutdown()
        wait_until(lambda: not server.engine.accepting, "it drains")
        stall(server, clock, lambda: server.engine.failure is not None)
        with pytest.raises(RequestFailed, match="a step has not ended for") as caught:
            list(running)
        assert caught.value.status is Status.UNAVAILABLE
        assert server.wait_for_exit() == HUNG


def test_an_engine_that_dies_in_a_drain_ends_its_streams_and_the_process() -> None:
    with served(serve_slowly(), drain_s=4 * WAIT_S) as server, connect(server) as client:
        running = client.generate("a", LONG, timeout_s=WAIT_S)
        next(running)
        server.request_shutdown()
        wait_until(lambda: not server.engine.accepting, "it drains")
        server.runner.broken = True
        with pytest.raises(RequestFailed, match="engine has died") as caught:
            list(running)
        assert caught.value.status is Status.UNAVAILABLE
        assert server.wait_for_exit() == 1
