"""The router's methods beside Generate: answered by any replica, by all, or by the one that has the request."""

import contextlib
import threading

import pytest
from route_parts import fake_server, routed
from serve_parts import WAIT_S, connect, serve_bytes, served, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import CallOptions, Client, RequestFailed
from jaxserve.errors import Status
from jaxserve.serve.gen import inference_pb2 as pb

LONG = SamplingParams(temperature=0.0, max_tokens=400)


def test_any_replica_answers_and_the_loads_are_added() -> None:
    with (
        served(serve_bytes(max_waiting=5)) as one,
        served(serve_bytes(max_waiting=6)) as two,
        routed(one.address, two.address) as router,
        Client(router.address) as client,
    ):
        wait_until(lambda: client.load().num_replicas == 2, "both are well")
        load = client.load()
        assert (load.num_pages, load.max_waiting, load.accepting) == (512, 11, True)
        assert client.tokenize("ab") == (256, 97, 98)
        assert client.detokenize((97, 98)) == "ab"
        assert client.model().name == "fake"
        with pytest.raises(RequestFailed, match="outside the vocabulary") as caught:
            client.detokenize([-1])
        assert caught.value.status is Status.INVALID


def test_an_abort_reaches_the_replica_that_has_the_request() -> None:
    with (
        served(serve_bytes(delay_s=0.005)) as one,
        served(serve_bytes(delay_s=0.005)) as two,
        routed(one.address, two.address) as router,
        Client(router.address) as client,
    ):
        streams = {name: client.generate("a", LONG, CallOptions(request_id=name), timeout_s=WAIT_S) for name in "xy"}
        for stream in streams.values():
            next(stream)
        client.abort("x", "nobody")
        last = list(streams["x"])[-1]
        assert last.finish_reason == pb.FINISH_REASON_ABORT
        assert one.engine.num_live + two.engine.num_live == 1, "the other goes on"
        client.abort("y")
        assert list(streams["y"])[-1].finish_reason == pb.FINISH_REASON_ABORT


def test_an_abort_of_a_request_that_waits_does_not_move_it_elsewhere() -> None:
    with (
        served(serve_bytes(max_rows=1, delay_s=0.005)) as one,
        served(serve_bytes(max_rows=1, delay_s=0.005)) as two,
        routed(one.address, two.address) as router,
        Client(router.address) as client,
        contextlib.ExitStack() as stack,
    ):
        wait_until(lambda: client.load().num_replicas == 2, "both are well")
        for _ in range(2):
            running = client.generate("a", LONG, timeout_s=WAIT_S)
            stack.callback(running.close)
            next(running)
        found: list[pb.GenerateResponse] = []
        options = CallOptions(request_id="w")
        thread = threading.Thread(target=lambda: found.extend(client.generate("a", LONG, options, timeout_s=WAIT_S)))
        thread.start()
        stack.callback(thread.join, WAIT_S)
        wait_until(lambda: client.load().num_waiting == 1, "it waits")
        client.abort("w")
        thread.join(WAIT_S)
        assert [reply.finish_reason for reply in found] == [pb.FINISH_REASON_ABORT]
        assert client.load().num_running == 2


def test_a_dead_replica_costs_no_question() -> None:
    with (
        fake_server() as (process, address),
        served(serve_bytes()) as well,
        routed(address, well.address, policy="round_robin") as router,
        Client(router.address) as client,
    ):
        wait_until(lambda: client.load().num_replicas == 2, "both are well")
        process.kill()
        process.wait(WAIT_S)
        for _ in range(4):
            assert client.detokenize((97,)) == "a"
        wait_until(lambda: client.load().num_replicas == 1, "one is left")


def test_without_replicas_there_is_no_answer() -> None:
    with routed("127.0.0.1:9", wait=False) as router, Client(router.address) as client:
        with pytest.raises(RequestFailed, match="no replica is well") as caught:
            client.model()
        assert caught.value.status is Status.UNAVAILABLE
        assert not client.load().accepting


def test_the_time_to_wait_comes_through() -> None:
    with (
        served(serve_bytes(max_rows=1, max_waiting=1)) as server,
        routed(server.address) as router,
        Client(router.address) as client,
        connect(server) as direct,
        contextlib.ExitStack() as stack,
    ):
        server.runner.hold()
        thread = threading.Thread(target=lambda: direct.complete([1], SamplingParams(max_tokens=2), timeout_s=WAIT_S))
        thread.start()
        stack.callback(thread.join, WAIT_S)
        stack.callback(server.runner.release)
        wait_until(lambda: server.engine.num_unstarted == 1, "one waits")
        with pytest.raises(RequestFailed, match=r"sched\.max_waiting is 1") as caught:
            client.complete([1], LONG, timeout_s=WAIT_S)
        assert caught.value.retry_after_s == 1.0
