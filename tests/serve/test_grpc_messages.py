"""Bytes of messages: what one caller holds shuts out no other, and what is no message is told so on every method."""

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from serve_parts import LONG, WAIT_S, Served, objects_of, serve_bytes, serve_slowly, served, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import CallOptions, Client, RequestFailed, Retries
from jaxserve.config.schema import GrpcConfig
from jaxserve.errors import InvalidRequest, MessagesFull, Status
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.grpc_errors import Arrivals
from jaxserve.serve.large_reads import LargeReads

KEYS = ("alpha", "beta")
SHORT = SamplingParams(temperature=0.0, max_tokens=2)
MIB = 2**20
ONCE = Retries(attempts=0)
AS_ONE = (("authorization", f"Bearer {KEYS[0]}"),)
GARBAGE = b"\x0a\x7fabc"  # promises more bytes than there are


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "tokens").write_text("\n".join(KEYS))
    config = GrpcConfig(
        port=0, tokens_file=str(tmp_path / "tokens"), max_message_bytes=2 * MIB, max_messages_bytes=4 * MIB
    )
    parts = serve_slowly()
    with served(parts, grpc_config=config):
        yield parts


def big(client: Client) -> Callable[[], None]:
    """A running stream whose message has a mebibyte."""
    salt = "s" * MIB
    updates = iter(client.generate("a", LONG, CallOptions(cache_salt=salt), timeout_s=WAIT_S))
    next(updates)
    return updates.close  # type: ignore[attr-defined]


def test_messages_of_one_caller_shut_out_no_other_and_count_until_their_calls_end(crowded: Served) -> None:
    with (
        Client(crowded.address, retries=ONCE, token=KEYS[0]) as one,
        Client(crowded.address, retries=ONCE, token=KEYS[1]) as two,
    ):
        running = [big(one) for _ in range(3)]
        with pytest.raises(RequestFailed, match=r"serve\.grpc\.max_messages_bytes") as caught:
            big(one)
        assert caught.value.status is Status.OVERLOADED and caught.value.retry_after_s == 1.0
        assert two.complete("a", SHORT, timeout_s=WAIT_S).text == "bc"
        assert two.is_serving(timeout_s=WAIT_S)
        for end in running:
            end()
        wait_until(lambda: crowded.engine.num_live == 0, "all have ended")
        big(one)()


def test_one_message_is_read_whatever_it_has(crowded: Served) -> None:
    with Client(crowded.address, retries=ONCE, token=KEYS[0]) as client:
        for _ in range(20):  # together far more than all calls may have at a time
            client.complete("a", SHORT, CallOptions(cache_salt="s" * MIB), timeout_s=WAIT_S)


def test_large_messages_are_parsed_in_turns_off_the_loop(crowded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[str] = []
    run = LargeReads.run

    async def noted(self: LargeReads, owner: str, read: Callable[[], object]) -> object:
        owners.append(owner)

        def read_elsewhere() -> object:
            assert threading.current_thread().name.startswith("jaxserve-large")
            return read()

        return await run(self, owner, read_elsewhere)

    monkeypatch.setattr(LargeReads, "run", noted)
    with (
        Client(crowded.address, retries=ONCE, token=KEYS[0]) as one,
        Client(crowded.address, retries=ONCE, token=KEYS[1]) as two,
    ):
        assert one.complete("a", SHORT, timeout_s=WAIT_S).text == "bc"
        assert owners == []  # a small one does not wait for large ones
        for client in (one, two):
            assert client.complete("a", SHORT, CallOptions(cache_salt="s" * MIB), timeout_s=WAIT_S).text == "bc"
    assert len(owners) == len(set(owners)) == 2
    with grpc.insecure_channel(crowded.address) as channel:
        replies = channel.unary_stream("/jaxserve.v1.Inference/Generate")(GARBAGE * 100_000, WAIT_S, AS_ONE)
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "cannot be decoded" in caught.value.details()


GENERATE = "/jaxserve.v1.Inference/Generate"
PLACES = 8  # of one caller, in which its messages arrive


@contextlib.asynccontextmanager
async def silent(channel: grpc.aio.Channel, count: int) -> AsyncIterator[None]:
    """So many calls that have begun and send no message."""
    calls = [channel.stream_stream(GENERATE)(metadata=AS_ONE, timeout=WAIT_S) for _ in range(count)]
    try:
        for call in calls:
            await call.wait_for_connection()
        yield
    finally:
        for call in calls:
            call.cancel()


async def test_a_caller_whose_messages_do_not_come_costs_others_nothing(crowded: Served) -> None:
    message = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2), cache_salt="s" * MIB)
    large = message.SerializeToString()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(crowded.address, options) as one, silent(one, PLACES):
        unread = one.stream_stream(GENERATE)(metadata=AS_ONE, timeout=WAIT_S)
        sending = asyncio.ensure_future(unread.write(large))
        async with grpc.aio.insecure_channel(crowded.address, options) as two:
            metadata = (("authorization", f"Bearer {KEYS[1]}"),)
            replies = [reply async for reply in two.unary_stream(GENERATE)(large, timeout=WAIT_S, metadata=metadata)]
        assert pb.GenerateResponse.FromString(replies[-1]).usage.num_generated_tokens == 2
        health = health_pb2_grpc.HealthStub(one)  # of the same caller and on its connection
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)).status == 1
        assert not sending.done(), "what nobody reads stays with its client"
        unread.cancel()
        with contextlib.suppress(asyncio.CancelledError, asyncio.InvalidStateError):
            await sending
    async with grpc.aio.insecure_channel(crowded.address, options) as one:  # its places are free again
        assert [reply async for reply in one.unary_stream(GENERATE)(large, timeout=WAIT_S, metadata=AS_ONE)]


async def test_messages_of_a_caller_arrive_a_few_at_a_time_and_calls_that_wait_have_a_limit() -> None:
    arrivals, come, arriving = Arrivals(), asyncio.Event(), list[str]()

    async def arrive(owner: str) -> None:
        async with arrivals.place(owner):
            arriving.append(owner)
            await come.wait()
            arriving.remove(owner)

    async def turns() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    mine = [asyncio.ensure_future(arrive("mine")) for _ in range(4096)]
    theirs = asyncio.ensure_future(arrive("theirs"))
    await turns()
    assert (arriving.count("mine"), arriving.count("theirs")) == (PLACES, 1)
    with pytest.raises(MessagesFull, match="4096 calls of yours") as refused:
        await arrive("mine")
    assert refused.value.retry_after_s == 1.0
    mine[0].cancel()  # one that arrives
    mine[-1].cancel()  # one that waits
    await turns()
    assert len(mine) - sum(each.done() for each in mine) == 4094
    come.set()
    await asyncio.gather(*mine, theirs, return_exceptions=True)
    assert not arrivals._places and not arrivals._num_calls


def test_a_message_that_does_not_come_in_time_ends_its_call() -> None:
    with (
        served(serve_bytes(), grpc_config=GrpcConfig(port=0, message_timeout_s=0.1)) as parts,
        grpc.insecure_channel(parts.address) as channel,
    ):
        never = threading.Event()
        waits = iter(lambda: never.wait(WAIT_S) and b"", b"")
        call = channel.stream_stream("/jaxserve.v1.Inference/Generate")(waits, timeout=WAIT_S)
        try:
            with pytest.raises(grpc.RpcError, match=r"serve\.grpc\.message_timeout_s") as caught:
                next(call)
        finally:
            never.set()
        assert isinstance(caught.value, grpc.Call) and caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.RpcError, match="no message") as caught:
            next(channel.stream_stream("/jaxserve.v1.Inference/Generate")(iter(()), timeout=WAIT_S))
        assert isinstance(caught.value, grpc.Call) and caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with Client(parts.address, retries=ONCE) as client:
            assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bc"


async def test_nothing_is_read_of_a_caller_without_a_token(crowded: Served) -> None:
    async with grpc.aio.insecure_channel(crowded.address) as channel:
        call = channel.stream_stream(GENERATE)(timeout=WAIT_S)  # it has sent nothing when it is refused
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


def test_what_has_too_many_parts_is_refused_before_it_is_looked_at(crowded: Served) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a")] * (2**14 + 1))
    ids = pb.TokenIds(ids=[7] * 500_000)
    with grpc.insecure_channel(crowded.address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        for call, told in (
            (lambda: next(stub.Generate(pb.GenerateRequest(chat=chat), timeout=WAIT_S, metadata=AS_ONE)), "16384"),
            (lambda: stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=WAIT_S, metadata=AS_ONE), "16384"),
            (lambda: next(stub.Generate(pb.GenerateRequest(token_ids=ids), timeout=WAIT_S, metadata=AS_ONE)), "500000"),
        ):
            with pytest.raises(grpc.RpcError, match=told) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        cut = pb.GenerateRequest(token_ids=ids, sampling=pb.SamplingParams(truncate_prompt_tokens=3, max_tokens=2))
        replies = list(stub.Generate(cut, timeout=WAIT_S, metadata=AS_ONE))
        assert replies[-1].usage.num_prompt_tokens == 3


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(serve_bytes()) as parts:
        yield parts


def test_garbage_is_told_so_by_health_and_reflection(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with grpc.insecure_channel(server.address) as channel:
        calls = [
            lambda: channel.unary_unary("/grpc.health.v1.Health/Check")(GARBAGE, timeout=WAIT_S),
            lambda: next(channel.unary_stream("/grpc.health.v1.Health/Watch")(GARBAGE, timeout=WAIT_S)),
            lambda: next(
                channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(
                    iter([GARBAGE]), timeout=WAIT_S
                )
            ),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
            assert "cannot be decoded" in caught.value.details()
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status == 1
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="none"), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (told,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]), timeout=WAIT_S)
        assert "jaxserve.v1.Inference" in {each.name for each in told.list_services_response.service}
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "message",
    [pb.GenerateRequest(text="a" * MIB).SerializeToString(), b"\x0a\x81\x80\x40" + b"\xff" * (MIB + 1)],
    ids=["refused", "undecodable"],
)
def test_a_message_that_was_refused_is_not_kept_until_a_collection(crowded: Served, message: bytes) -> None:
    """gRPC keeps the error that ends a call in a cycle with the call: megabytes, beside an engine that works."""

    def kept() -> set[int]:
        """Requests, and errors whose frames hold the message."""
        errors = [each for each in objects_of(InvalidRequest, DecodeError) if each.__traceback__ is not None]
        return {id(each) for each in (*errors, *objects_of(pb.GenerateRequest))}

    gc.collect()
    before = kept()  # of other tests
    gc.disable()
    try:
        with grpc.insecure_channel(crowded.address) as channel:
            call = channel.unary_stream("/jaxserve.v1.Inference/Generate")
            with pytest.raises(grpc.RpcError) as caught:
                next(call(message, metadata=AS_ONE, timeout=WAIT_S))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        wait_until(lambda: kept() <= before, "it is let go")
    finally:
        gc.enable()
