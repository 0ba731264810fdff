"""The router before real servers on fake devices: what is passed on, what moves, and what a client is told."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence

import grpc
import pytest
from route_parts import Routed, fake_server, routed
from serve_parts import (
    LONG,
    LONG_TOKENS,
    ONE_CALL,
    WAIT_S,
    Parts,
    Served,
    connect,
    serve_bytes,
    serve_slowly,
    served,
    wait_until,
)

from jaxserve import cli
from jaxserve.api import ResumeReason, SamplingParams
from jaxserve.client import CallOptions, Client, Completion, RequestFailed
from jaxserve.config.schema import RouteConfig
from jaxserve.engine import EngineGroup
from jaxserve.errors import ConfigError, Status
from jaxserve.routing import PromptKey, create_router
from jaxserve.serve import route_pool
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.route_access import BackendAccess
from jaxserve.serve.route_pool import Pool, split_replicas
from jaxserve.serve.route_service import DESTINATION_HEADER, key_of_request

SHORT = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("jaxserve")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def pair() -> Iterator[tuple[Served, Served]]:
    with served(serve_slowly(max_rows=4)) as one, served(serve_slowly(max_rows=4)) as two:
        yield one, two


@pytest.fixture
def router(pair: tuple[Served, Served]) -> Iterator[Routed]:
    with routed(*(server.address for server in pair)) as router:
        wait_until(lambda: all(has_answered(router, server) for server in pair), "both are well")
        yield router


def has_answered(router: Routed, server: Served) -> bool:
    with Client(router.address) as client:
        client.complete("a", SHORT, timeout_s=WAIT_S)
    return server.runner.inner.num_steps > 0


def all_free(*servers: Parts) -> None:
    wait_until(
        lambda: all(not s.scheduler.has_work() and s.scheduler.num_held_pages == 0 for s in servers), "pages are free"
    )


# ---- passing on ------------------------------------------------------------------------------------------------------


def test_answers_come_through_and_replicas_share_the_work(pair: tuple[Served, Served], router: Routed) -> None:
    before = [server.runner.inner.num_steps for server in pair]
    with Client(router.address) as client, connect(pair[0]) as direct:
        for prompt in ("a", [97], [{"role": "user", "content": "a"}]):
            sampling = SamplingParams(temperature=0.0, max_tokens=5, n=2, logprobs=1)
            options = CallOptions(request_id="mine", echo=True, cache_salt="s", tenant="t")
            mine = client.complete(prompt, sampling, options, timeout_s=WAIT_S)
            straight = direct.complete(prompt, sampling, options, timeout_s=WAIT_S)
            assert dataclasses.replace(mine, num_cached_tokens=0) == dataclasses.replace(straight, num_cached_tokens=0)
        assert client.complete("a", SHORT, timeout_s=WAIT_S).request_id
    assert all(server.runner.inner.num_steps > steps for server, steps in zip(pair, before, strict=True))


def test_what_a_replica_refuses_comes_through_as_it_is(router: Routed) -> None:
    with Client(router.address) as client, pytest.raises(RequestFailed, match="at most 32767") as caught:
        client.complete([1], SamplingParams(max_tokens=50_000), timeout_s=WAIT_S)
    assert caught.value.status is Status.INVALID


def test_a_field_of_the_future_is_for_the_replica_to_refuse(router: Routed) -> None:
    newer = pb.GenerateRequest(text="a").SerializeToString() + b"\xc2\x3e\x01x"  # field 1000
    with grpc.insecure_channel(router.address) as channel:
        call = channel.unary_stream("/jaxserve.v1.Inference/Generate")(newer, timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no field 1000" in (caught.value.details() or "")


def test_a_client_that_leaves_and_a_deadline_free_the_replica(pair: tuple[Served, Served], router: Routed) -> None:
    with Client(router.address) as client:
        streams = [client.generate([i], LONG, timeout_s=WAIT_S) for i in range(6)]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.close()
        with pytest.raises(RequestFailed) as caught:
            client.complete([1], LONG, timeout_s=0.5)
        assert caught.value.status is Status.DEADLINE
    all_free(*pair)
    assert sum(server.runner.inner.num_steps for server in pair) < LONG_TOKENS, "they ran to their end"


def test_an_id_that_is_live_on_another_replica_is_refused(router: Routed) -> None:
    with Client(router.address) as client:
        running = client.generate([1], LONG, CallOptions(request_id="mine"), timeout_s=WAIT_S)
        next(running)
        with pytest.raises(RequestFailed, match="'mine' is live already") as caught:
            client.complete([1], SHORT, CallOptions(request_id="mine"), timeout_s=WAIT_S)
        assert caught.value.status is Status.INVALID
        running.close()


def test_a_picker_in_front_chooses_the_replica(pair: tuple[Served, Served]) -> None:
    """By address, or by host where it is no other replica's; strangers are passed over, and never asked."""
    one, two = pair
    with routed(one.address, two.address, access={"destination_header": True}) as router:
        wait_until(lambda: all(has_answered(router, server) for server in pair), "both are well")
        for named in (two.address, f"192.0.2.1:8000, {two.address},{one.address}"):
            before = [server.runner.inner.num_steps for server in pair]
            for _ in range(3):
                _generate(router, named)
            assert one.runner.inner.num_steps == before[0] and two.runner.inner.num_steps > before[1], named
        before = [server.runner.inner.num_steps for server in pair]
        for _ in range(4):
            _generate(router, "127.0.0.1:8000")  # both are there, so the host does not tell
        assert all(server.runner.inner.num_steps > steps for server, steps in zip(pair, before, strict=True))


def test_a_picker_that_knows_other_ports_and_a_replica_that_is_gone() -> None:
    with served(serve_slowly(max_rows=4)) as one, served(serve_slowly(max_rows=4)) as two:
        elsewhere = two.address.replace("127.0.0.1", "localhost")
        with routed(one.address, elsewhere, access={"destination_header": True}) as router:
            wait_until(lambda: all(has_answered(router, server) for server in (one, two)), "both are well")
            before = one.runner.inner.num_steps
            _generate(router, "localhost:8000")
            assert one.runner.inner.num_steps == before
            two.request_shutdown()
            two.wait_for_exit()
            _generate(router, "localhost:8000")  # a picker may be a second late
            assert one.runner.inner.num_steps > before


def _generate(router: Routed, destination: str) -> None:
    with grpc.insecure_channel(router.address) as channel:
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2))
        call = pb_grpc.InferenceStub(channel).Generate(
            request, timeout=WAIT_S, metadata=[(DESTINATION_HEADER, destination)]
        )
        assert list(call)


def test_prompts_with_a_common_beginning_meet() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=2)
    with (
        served(serve_bytes()) as one,
        served(serve_bytes()) as two,
        routed(one.address, two.address, policy="prefix") as router,
        Client(router.address) as client,
    ):
        wait_until(lambda: has_answered(router, one) and has_answered(router, two), "both are well")
        for name in ("left ", "right "):
            first = client.complete(name * 40 + "0", long, timeout_s=WAIT_S)
            assert first.num_cached_tokens == 0
            for number in range(1, 5):
                again = client.complete(name * 40 + str(number), long, timeout_s=WAIT_S)
                assert again.num_cached_tokens > 150, "it went where the beginning is"


def test_keys_of_messages() -> None:
    def key(**fields) -> PromptKey:
        return key_of_request(pb.GenerateRequest(**fields))

    chat = [pb.ChatMessage(role="system", content="x" * 100), pb.ChatMessage(role="user", content="a" * 100)]
    other = [chat[0], pb.ChatMessage(role="user", content="b" * 100)]
    first, second = (key(chat=pb.ChatMessages(messages=m)) for m in (chat, other))
    assert first[0] == second[0]
    assert first[-1] != second[-1]
    ids = pb.TokenIds(ids=range(64))
    assert len(key(token_ids=ids)) == 4
    assert key(token_ids=ids) != key(token_ids=ids, cache_salt="s") != key(token_ids=ids, tenant="s")
    assert key() == ()


# ---- replicas that are full, drain or die ----------------------------------------------------------------------------


def test_a_full_replica_is_passed_over_once() -> None:
    with (
        served(serve_bytes(max_rows=1, max_waiting=1)) as one,
        served(serve_bytes(max_rows=1, max_waiting=1)) as two,
        routed(one.address, two.address) as router,
        contextlib.ExitStack() as stack,
        Client(router.address) as client,
    ):
        wait_until(lambda: has_answered(router, one) and has_answered(router, two), "both are well")
        stub = pb_grpc.InferenceStub(client._channel)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[97]), sampling=pb.SamplingParams(max_tokens=5))
        with connect(one) as direct:
            one.runner.hold()
            full = pb_grpc.InferenceStub(direct._channel).Generate(request, timeout=WAIT_S)
            stack.callback(full.cancel)
            wait_until(lambda: one.engine.num_unstarted == 1, "the first is full")
            for _ in range(4):
                assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef"
            two.runner.hold()
            other = stub.Generate(request, timeout=WAIT_S)
            stack.callback(other.cancel)
            wait_until(lambda: two.engine.num_unstarted == 1, "the second is full")
            with pytest.raises(RequestFailed, match=r"sched\.max_waiting is 1") as caught:
                client.complete("a", SHORT, timeout_s=WAIT_S)
            assert caught.value.status is Status.OVERLOADED
            one.runner.release()
            two.runner.release()
            assert len(list(full)) == len(list(other)) == 5


def test_a_replica_that_dies_with_requests(pair: tuple[Served, Served], router: Routed) -> None:
    one, two = pair
    with Client(router.address) as client:
        sampling = SamplingParams(temperature=0.0, max_tokens=40, seed=7, logprobs=1)
        whole = client.complete([1], sampling, CallOptions(request_id="r"), timeout_s=WAIT_S)
        answers: list[Completion | RequestFailed] = []

        def ask(prompt: str | list[int], sampling: SamplingParams) -> None:
            try:
                answers.append(client.complete(prompt, sampling, timeout_s=WAIT_S))
            except RequestFailed as error:
                answers.append(error)

        one.runner.hold()
        two.runner.hold()
        running = [threading.Thread(target=ask, args=([1], sampling)) for _ in range(8)]
        for thread in running:
            thread.start()
        wait_until(lambda: one.engine.num_unstarted == two.engine.num_unstarted == 4, "four rows each: all run")
        one.runner.hold(after=12)
        two.runner.hold(after=12)
        wait_until(lambda: one.engine.num_unstarted == two.engine.num_unstarted == 0, "all have begun")
        waiting = [threading.Thread(target=ask, args=("a", SHORT)) for _ in range(6)]
        for thread in waiting:
            thread.start()
        wait_until(lambda: one.engine.num_unstarted == two.engine.num_unstarted == 3, "three wait at each")
        one.runner.broken = True
        one.runner.release()
        wait_until(lambda: two.engine.num_unstarted == 10, "all six wait at the other, and the four that had begun")
        two.runner.release()
        for thread in (*running, *waiting):
            thread.join(WAIT_S)
        same = dict.fromkeys(("request_id", "num_cached_tokens"), 0)
        found = [dataclasses.replace(answer, **same) for answer in answers if isinstance(answer, Completion)]
        assert len(found) == 14
        assert sum(answer == dataclasses.replace(whole, **same) for answer in found) == 8, "as if nothing had happened"
        assert sum(answer.text == "bcdef" for answer in found) == 6
        assert router.is_healthy()
    totals = two.engine.stats[0].totals()
    assert totals.resumed[ResumeReason.DIED] == 4
    assert 4 <= totals.known_tokens < 160
    assert one.wait_for_exit() == 1


def read(stream: Iterable[pb.GenerateResponse]) -> tuple[list[pb.GenerateResponse], RequestFailed | None]:
    """What came, and the error that ended it."""
    replies: list[pb.GenerateResponse] = []
    try:
        replies.extend(stream)
    except RequestFailed as error:
        return replies, error
    return replies, None


def test_a_replica_that_drains_gets_nothing_new_and_what_it_cuts_off_moves() -> None:
    with (
        served(serve_bytes(max_rows=1), drain_s=0.3) as one,
        served(serve_bytes(max_rows=1)) as two,
        routed(one.address, two.address, retries=0) as router,  # a drain is no death
        Client(router.address) as client,
    ):
        wait_until(lambda: has_answered(router, one) and has_answered(router, two), "both are well")
        one.runner.hold()
        answers: list[str] = []
        asking = [
            threading.Thread(target=lambda: answers.append(client.complete("a", SHORT, timeout_s=WAIT_S).text))
            for _ in range(6)
        ]
        for thread in asking:
            thread.start()
        wait_until(lambda: one.engine.num_unstarted == 3, "three are at the first")
        one.request_shutdown()
        wait_until(lambda: not one.engine.accepting, "it drains")
        for _ in range(4):
            assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef"
        wait_until(lambda: one.engine._stop_now.is_set(), "its time is over")
        one.runner.release()
        for thread in asking:
            thread.join(WAIT_S)
        assert answers == ["bcdef"] * 6, "two had not begun and one had, and all three moved"
        assert one.wait_for_exit() == 0
        assert two.engine.stats[0].totals().resumed[ResumeReason.DRAINED] == 1


def test_a_client_without_a_router_goes_on_at_another_server() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=60, seed=7)
    with served(serve_slowly(), drain_s=0.0) as one, served(serve_slowly()) as two:
        with connect(two) as direct:
            whole = direct.complete("a", sampling, timeout_s=WAIT_S)
        with Client(f"ipv4:{one.address},{two.address}") as client:
            one.runner.hold(after=10)
            running = client.generate("a", sampling, timeout_s=WAIT_S)
            replies = [next(running)]
            one.request_shutdown()
            wait_until(lambda: one.engine._stop_now.is_set(), "it is to stop")
            one.runner.release()
            replies += running
        assert [i for r in replies for i in r.token_ids] == list(whole.outputs[0].token_ids)
        assert two.engine.stats[0].totals().resumed[ResumeReason.DRAINED] == 1


def test_an_abort_past_the_router_is_an_abort(pair: tuple[Served, Served], router: Routed) -> None:
    with Client(router.address, retries=ONE_CALL) as client:
        running = client.generate("a", LONG, CallOptions(request_id="mine"), timeout_s=WAIT_S)
        next(running)
        for server in pair:
            server.engine.abort("mine")
        assert list(running)[-1].finish_reason == pb.FINISH_REASON_ABORT
    all_free(*pair)


def test_an_abort_while_no_replica_is_well_says_where_the_stream_ends() -> None:
    with (
        fake_server(delay_s=0.01) as (doomed, address),
        routed(address, wait_s=WAIT_S) as router,
        Client(router.address, retries=ONE_CALL) as client,
    ):
        running = client.generate("a", LONG, CallOptions(request_id="mine"), timeout_s=WAIT_S)
        replies = [next(running)]
        doomed.kill()
        wait_until(lambda: not router.is_healthy(), "none is well")
        client.abort("mine")
        replies += running
        *before, last = replies
        assert last.finish_reason == pb.FINISH_REASON_ABORT
        assert last.token_offset == sum(len(r.token_ids) for r in before) > 0
        assert last.text_offset == sum(len(r.text) for r in before)


def test_retries_are_bounded() -> None:
    with (
        served(serve_bytes(max_rows=1)) as one,
        served(serve_bytes(max_rows=1)) as two,
        routed(one.address, two.address, retries=0) as router,
        Client(router.address) as client,
    ):
        wait_until(lambda: has_answered(router, one) and has_answered(router, two), "both are well")
        for server in (one, two):
            server.runner.broken = True
        with pytest.raises(RequestFailed, match=r"1 replicas have died .*route\.retries is 0.*the device") as caught:
            client.complete("a", SHORT, timeout_s=WAIT_S)
        assert caught.value.status is Status.UNAVAILABLE


def test_a_router_is_red_without_replicas_and_green_when_one_comes_back() -> None:
    with (
        fake_server() as (process, address),
        routed(address) as router,
        Client(router.address, retries=ONE_CALL) as client,
    ):
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef"
        process.kill()
        process.wait(WAIT_S)
        with pytest.raises(
            RequestFailed, match=rf"no replica is well: {address}|has died before an answer \({address}"
        ) as caught:
            client.complete("a", SHORT, timeout_s=WAIT_S)
        assert caught.value.status is Status.UNAVAILABLE
        wait_until(lambda: not router.is_healthy(), "it is red")
        with fake_server(port=int(address.rsplit(":", 1)[1])):
            wait_until(router.is_healthy, "it is green again")
            assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef"


def test_a_router_without_a_replica_starts_red() -> None:
    with routed("127.0.0.1:1", wait=False) as router, Client(router.address) as client:
        assert not router.is_healthy()
        with pytest.raises(RequestFailed, match="no replica is well: 127.0.0.1:1: ") as caught:
            client.complete("a", SHORT, timeout_s=WAIT_S)
        assert caught.value.status is Status.UNAVAILABLE


def test_sigkill_of_a_process_under_load_loses_nothing() -> None:
    """Processes on fake devices; `test_route_demo` does it with the model."""
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    expected = tuple((97 + i) % 128 for i in range(1, 21))
    right: list[int] = []
    told: list[RequestFailed] = []

    def ask(client: Client, count: int) -> None:
        for number in range(count):
            replies, error = read(client.generate([number, 97], sampling, timeout_s=WAIT_S))
            ids = tuple(i for r in replies for i in r.token_ids)
            if error is None and ids == expected:
                right.append(number)
            elif error is not None and ids and f"after {len(ids)} tokens had been streamed" in str(error):
                told.append(error)

    with (
        fake_server(delay_s=0.004) as (doomed, first),
        fake_server(delay_s=0.004) as (_, second),
        routed(first, second) as router,
        Client(router.address) as client,
    ):
        threads = [threading.Thread(target=ask, args=(client, 6)) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(right) >= 12, "the load runs")
        doomed.kill()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(right) + len(told) == 72
        assert len(told) <= 8, "it had four rows, and their last messages may have been on their way"
        assert all(f"replica {first} has died" in str(error) for error in told)


@pytest.mark.slow
def test_a_replica_that_falls_silent_is_found_by_pings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process stands for a cut cable: its kernel keeps the connection, and nobody answers."""
    caplog.set_level(logging.INFO, "jaxserve")
    with contextlib.ExitStack() as stack:
        silent, first = stack.enter_context(fake_server(delay_s=0.01))
        _, second = stack.enter_context(fake_server(delay_s=0.01))
        ping_often(monkeypatch, first)
        router = stack.enter_context(routed(first, second, policy="round_robin"))
        client = stack.enter_context(Client(router.address))
        wait_until(lambda: all(f"replica {a} is well" in caplog.text for a in (first, second)), "both are well")
        running = [client.generate([97], LONG, CallOptions(request_id=name), timeout_s=WAIT_S) for name in "xy"]
        for stream in running:
            next(stream)
        silent.send_signal(signal.SIGSTOP)
        assert [client.complete("a", SHORT, timeout_s=WAIT_S).text for _ in range(4)] == ["bcdef"] * 4
        client.abort("x", "y")
        assert [error for _, error in map(read, running)] == [None, None]
        assert f"leaves replica {first} after" in caplog.text
        well = caplog.text.count(f"replica {first} is well")  # once, unless a busy machine has lost it before
        silent.send_signal(signal.SIGCONT)
        wait_until(lambda: caplog.text.count(f"replica {first} is well") > well, "it is welcome again")


def ping_often(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """One replica alone is lost soon when it does not answer."""
    short = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 5000, "grpc.http2.ping_timeout_ms": 5000}
    assert set(short) <= {name for name, _ in route_pool._OPTIONS}
    often = tuple((name, short.get(name, value)) for name, value in route_pool._OPTIONS)
    plain = BackendAccess.open

    def open_channel(self: BackendAccess, to: str, options: tuple[tuple[str, int], ...]) -> object:
        return plain(self, to, often if to == address else options)

    monkeypatch.setattr(BackendAccess, "open", open_channel)


def test_a_call_without_a_deadline(router: Routed) -> None:
    with Client(router.address) as client:
        assert client.complete("a", SHORT).text == "bcdef"


# ---- the router stops ------------------------------------------------------------------------------------------------


def test_a_router_drains(pair: tuple[Served, Served]) -> None:
    with (
        routed(*(s.address for s in pair), drain_s=WAIT_S) as router,
        Client(router.address, retries=ONE_CALL) as client,
    ):
        for server in pair:
            server.runner.hold(after=4)
        running = client.generate([1], SamplingParams(temperature=0.0, max_tokens=100), timeout_s=WAIT_S)
        replies = [next(running)]
        router.request_shutdown()
        wait_until(lambda: not router.is_healthy(), "it is red")
        with pytest.raises(RequestFailed, match="shutting down") as caught:
            client.complete("a", SHORT, timeout_s=WAIT_S)
        assert caught.value.status is Status.UNAVAILABLE
        for server in pair:
            server.runner.release()
        replies += running
        assert len(replies) == 100
        assert router.wait_for_exit() == 0


def test_what_outlives_the_drain_of_a_router_is_told(pair: tuple[Served, Served]) -> None:
    with (
        routed(*(s.address for s in pair), drain_s=0.1) as router,
        Client(router.address, retries=ONE_CALL) as client,
    ):
        running = client.generate([1], LONG, timeout_s=WAIT_S)
        num_tokens = len(next(running).token_ids)
        router.request_shutdown()
        replies, error = read(running)
        num_tokens += sum(len(reply.token_ids) for reply in replies)
        assert f"router is shutting down; {num_tokens} tokens had been streamed" in str(error)
        assert router.wait_for_exit() == 0
    all_free(*pair)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_replicas_follow_a_name(pair: tuple[Served, Served], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    one, two = (server.address for server in pair)
    found: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("replicas.example", 8500)
        if not found:
            raise OSError("no such name")
        return list(found)

    with (
        routed("dns:///replicas.example:8500", resolve=resolve, wait=False) as router,
        Client(router.address) as client,
    ):
        with pytest.raises(RequestFailed, match="no name has an address yet"):
            client.complete("a", SHORT, timeout_s=WAIT_S)
        found.append(one)
        wait_until(router.is_healthy, "the first is there")
        running = client.generate([1], SamplingParams(temperature=0.0, max_tokens=100), timeout_s=WAIT_S)
        replies = [next(running)]
        found[:] = [two]
        wait_until(lambda: has_answered(router, pair[1]), "the second is there")
        steps = pair[1].runner.inner.num_steps
        for _ in range(3):
            assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef"
        assert pair[1].runner.inner.num_steps >= steps + 15, "the first gets nothing more"
        replies += running
        assert len(replies) == 100, "and ends what it has"
        found.clear()
        wait_until(lambda: f"replica {one} has left" in caplog.text, "the first has left")
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef", (
            "a name server that is away changes nothing"
        )


def test_a_real_name_is_resolved() -> None:
    with served(serve_bytes()) as server:
        port = server.address.rsplit(":", 1)[1]
        with routed(f"dns:///localhost:{port}") as router, Client(router.address) as client:
            assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef"


# ---- configuration and the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:0", "host:65536", "http://h:80", "dns:///n", "::1:80"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must have HOST:PORT"):
        split_replicas([text])


def test_addresses_and_names() -> None:
    assert split_replicas(["a:1", "dns:///b.c:2", "[::1]:3"]) == (["a:1", "[::1]:3"], [("b.c", 2)])
    for twice in (["a:1", "a:1"], ["dns:///b:1", "dns:///b:1"]):
        with pytest.raises(ConfigError, match="twice"):
            split_replicas(twice)
    with pytest.raises(ConfigError, match="give --to HOST:PORT"):
        Pool(RouteConfig(), create_router("prefix"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--port", "0"], "give --to HOST:PORT"),
        (["--to", "a:1"], "set serve.grpc.port"),
        (["--to", "a:1", "--port", "0", "--policy", "prefx"], "Did you mean 'prefix'"),
        (
            ["--to", "a:1", "--set", "serve.tenants.default.tokens_per_s=9"],
            "does not use serve.tenants.default.tokens_per_s",
        ),
        (["--to", "a:1", "--set", "model.dtype=bfloat16"], "does not use model.dtype (--set)"),
        (["--to", "a:1", "--set", "serve.http.batch_dir=/tmp"], "does not use serve.http.batch_dir (--set)"),
    ],
)
def test_the_command_says_what_is_missing(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["route", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_the_router_loads_no_jax() -> None:
    code = "import sys, jaxserve.serve.route; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert not set(loaded.stdout.split()) & {"jax", "flax", "jaxlib"}


# ---- replicas in one process behind the same door --------------------------------------------------------------------


def test_a_group_behind_a_door() -> None:
    one, two = (serve_slowly(max_rows=4) for _ in range(2))

    class Both(Served):
        def __init__(self) -> None:
            self.engine = EngineGroup([one.engine, two.engine], create_router("least_load"))
            self.runner = one.runner

    with served(Both()) as server, Client(server.address, retries=ONE_CALL) as client:
        names = [f"r{i}" for i in range(8)]
        streams = [client.generate([1], LONG, CallOptions(request_id=name), timeout_s=WAIT_S) for name in names]
        for stream in streams:
            next(stream)
        one.runner.broken = True
        wait_until(lambda: one.engine.failure is not None, "it is dead")
        client.abort(*names)
        for stream in streams:
            replies, error = read(stream)
            assert error is None, "four have moved, and all eight were aborted"
            assert replies[-1].finish_reason == pb.FINISH_REASON_ABORT
        assert client.is_serving(timeout_s=WAIT_S), "one replica is left"
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcdef"
        two.runner.broken = True
        with pytest.raises(RequestFailed, match="has died"):
            client.complete("a", SHORT, timeout_s=WAIT_S)
        assert server.wait_for_exit() == 1


async def test_a_lost_client_of_a_group_frees_its_replica() -> None:
    parts = serve_slowly()
    group = EngineGroup([parts.engine], create_router("round_robin"))
    from jaxserve.engine import AsyncEngine

    streams = AsyncEngine(group)
    group.start()
    try:
        request = group.prepare([1], LONG)
        async with contextlib.aclosing(streams.stream(request)) as updates:
            async for _ in updates:
                break
        await asyncio.to_thread(all_free, parts)
        assert parts.runner.inner.num_steps < LONG_TOKENS
    finally:
        await asyncio.to_thread(group.stop)
        streams.close()
