"""The router's methods beside Generate: answered by any replica, by all, or by the one that has the request."""

import contextlib
import signal
import threading
import time

import pytest
from route_parts import fake_server, routed
from serve_parts import LONG, WAIT_S, connect, serve_bytes, serve_slowly, served, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import CallOptions, Client, RequestFailed, ServerLoad
from jaxserve.errors import Status
from jaxserve.serve import route_service
from jaxserve.serve.gen import inference_pb2 as pb


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
        served(serve_slowly()) as one,
        served(serve_slowly()) as two,
        routed(one.address, two.address) as router,
        Client(router.address) as client,
    ):
        streams = {name: client.generate("a", LONG, CallOptions(request_id=name), timeout_s=WAIT_S) for name in "xy"}
        for stream in streams.values():
            next(stream)
        client.abort("x", "nobody")
        last = list(streams["x"])[-1]
        assert last.finish_reason == pb.FINISH_REASON_ABORT
        wait_until(lambda: one.engine.num_live + two.engine.num_live == 1, "one has ended, and the other goes on")
        client.abort("y")
        assert list(streams["y"])[-1].finish_reason == pb.FINISH_REASON_ABORT


def test_an_abort_of_a_request_that_waits_does_not_move_it_elsewhere() -> None:
    with (
        served(serve_slowly(max_rows=1)) as one,
        served(serve_slowly(max_rows=1)) as two,
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
        assert client.load(timeout_s=WAIT_S).num_running == 2


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
            client.complete([1], SamplingParams(max_tokens=2), timeout_s=WAIT_S)
        assert caught.value.retry_after_s == 1.0


def test_a_full_replica_says_when_to_come_again_to_a_question_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        served(serve_bytes(max_waiting=1)) as server,
        routed(server.address) as router,
        Client(router.address) as client,
        contextlib.ExitStack() as stack,
    ):
        entered, go_on, tokenizer = threading.Event(), threading.Event(), server.engine.tokenizer
        assert tokenizer is not None
        encode = tokenizer.encode

        def slow(*args, **options):
            entered.set()
            assert go_on.wait(WAIT_S)
            return encode(*args, **options)

        monkeypatch.setattr(tokenizer, "encode", slow)
        thread = threading.Thread(target=lambda: client.tokenize("a", timeout_s=WAIT_S))
        thread.start()
        stack.callback(thread.join, WAIT_S)
        stack.callback(go_on.set)
        assert entered.wait(WAIT_S)
        with pytest.raises(RequestFailed, match="wait to be encoded") as caught:
            client.tokenize("a")
        assert (caught.value.status, caught.value.retry_after_s) == (Status.OVERLOADED, 1.0)


def test_a_replica_that_has_just_fallen_silent_does_not_hold_up_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_service, "_LOAD_S", 0.3)
    with (
        fake_server() as (silent, address),
        served(serve_bytes()) as well,
        routed(address, well.address) as router,
        Client(router.address) as client,
    ):
        wait_until(lambda: client.load().num_replicas == 2, "both are well")
        silent.send_signal(signal.SIGSTOP)
        loads: list[ServerLoad] = []

        def is_told() -> bool:
            loads.append(client.load(timeout_s=WAIT_S))
            return loads[-1].num_replicas > 0  # on a busy machine the other may be late, too

        wait_until(is_told, "the load of the other")
        assert (loads[-1].num_replicas, loads[-1].num_pages) == (1, 256)


def test_the_time_of_a_request_does_not_begin_again_when_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        served(serve_bytes()) as one,
        served(serve_bytes()) as two,
        routed(one.address, two.address, policy="round_robin") as router,
        Client(router.address) as client,
    ):
        wait_until(lambda: client.load().num_replicas == 2, "both are well")
        given: list[float] = []
        for server in (one, two):
            prepare = server.engine.prepare

            def note(prompt, sampling, options, prepare=prepare):
                given.append(options.timeout_s)
                return prepare(prompt, sampling, options)

            monkeypatch.setattr(server.engine, "prepare", note)
            server.runner.hold()
        answers: list[str] = []
        options = CallOptions(timeout_s=1000.0)
        sampling = SamplingParams(temperature=0.0, max_tokens=3)
        thread = threading.Thread(target=lambda: answers.append(client.complete("a", sampling, options).text))
        thread.start()
        wait_until(lambda: one.engine.num_unstarted + two.engine.num_unstarted == 1, "it is at one of them")
        first, second = (one, two) if one.engine.num_unstarted else (two, one)
        time.sleep(0.3)
        first.runner.broken = True
        first.runner.release()
        wait_until(lambda: second.engine.num_unstarted == 1, "it has moved")
        second.runner.release()
        thread.join(WAIT_S)
        assert answers == ["bcd"]
        assert given[0] <= 1000.0
        assert given[1] <= given[0] - 0.3
