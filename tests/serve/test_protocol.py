"""What others see of the protocol: callers who know it by reflection alone, who ping too often, or who ask too much."""

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from route_parts import fake_server
from serve_parts import LONG, ONE_CALL, WAIT_S, connect, serve_bytes, serve_slowly, served, wait_until

from jaxserve.api import PromptInfo, Request, SamplingParams, TokenLogprobs
from jaxserve.client import CallOptions, Client, RequestFailed, blocking
from jaxserve.config.schema import GrpcConfig
from jaxserve.engine import Update
from jaxserve.errors import Status
from jaxserve.serve import grpc_service
from jaxserve.serve.convert import MAX_ABORT_IDS
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.replies import Replies
from jaxserve.serve.turns import Turns
from jaxserve.testing import ManualClock

SHORT = SamplingParams(temperature=0.0, max_tokens=5)


def test_generate_can_be_called_by_what_reflection_says() -> None:
    with served(serve_bytes()) as server, grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "jaxserve.v1.Inference" in database.get_services()
        service = DescriptorPool(database).FindServiceByName("jaxserve.v1.Inference")
        assert set(service.methods_by_name) == {"Generate", "Tokenize", "Detokenize", "GetModel", "GetLoad", "Abort"}
        method = service.methods_by_name["Generate"]
        assert method.server_streaming
        ask, read = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        assert ask is not pb.GenerateRequest
        request = ask(text="a")
        request.sampling.temperature, request.sampling.max_tokens = 0.0, 5
        call = channel.unary_stream(
            f"/{service.full_name}/{method.name}",
            request_serializer=ask.SerializeToString,
            response_deserializer=read.FromString,
        )
        assert "".join(reply.text for reply in call(request, timeout=WAIT_S)) == "bcdef"


@pytest.mark.slow  # gRPC lets a client ask once a second at most, and forgives twice
def test_a_client_that_pings_too_often_is_sent_away_alone() -> None:
    """A message from the server allows pings again, so the one who asks here is kept waiting."""
    eager = (("grpc.keepalive_time_ms", 20), ("grpc.http2.max_pings_without_data", 0))
    config = GrpcConfig(port=0, min_ping_interval_s=WAIT_S)
    with served(serve_bytes(), grpc_config=config) as server, connect(server) as patient:
        server.runner.hold()
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(patient.complete("a", SHORT, timeout_s=WAIT_S).text))
        asking.start()
        wait_until(lambda: server.engine.num_unstarted == 1, "one waits")
        with grpc.insecure_channel(server.address, options=eager) as channel:
            call = channel.unary_stream("/jaxserve.v1.Inference/Generate")
            with pytest.raises(grpc.RpcError) as caught:
                list(call(pb.GenerateRequest(text="a").SerializeToString(), timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "ping" in caught.value.details().lower()
        server.runner.release()
        asking.join(WAIT_S)
        assert answers == ["bcdef"]
        wait_until(lambda: server.scheduler.num_held_pages == 0, "pages are free")


@pytest.mark.slow
def test_a_server_that_vanishes_does_not_keep_a_client_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process stands for a cut cable: its kernel keeps the connection, and nobody answers."""
    short = {"grpc.keepalive_time_ms": 500, "grpc.keepalive_timeout_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}
    options = blocking.CHANNEL_OPTIONS
    assert set(short) <= {name for name, _ in options}
    monkeypatch.setattr(blocking, "CHANNEL_OPTIONS", tuple((name, short.get(name, value)) for name, value in options))
    with fake_server(delay_s=0.02) as (process, address), Client(address, retries=ONE_CALL) as client:
        replies = client.generate("a", LONG)

        def read() -> None:
            """A server that a busy machine keeps from answering pings before it is stopped is lost by the same way."""
            next(replies)
            process.send_signal(signal.SIGSTOP)
            list(replies)

        with pytest.raises(RequestFailed) as caught:
            read()
        assert caught.value.status is Status.UNAVAILABLE


# ---- Abort -----------------------------------------------------------------------------------------------------------


def test_a_token_aborts_its_own_requests_alone(tmp_path: Path) -> None:
    """As docs/grpc.md says."""
    (tmp_path / "tokens").write_text("alpha\nbeta\n")
    config = GrpcConfig(port=0, tokens_file=str(tmp_path / "tokens"))
    with (
        served(serve_slowly(), grpc_config=config) as server,
        Client(server.address, token="alpha") as alpha,
        Client(server.address, token="beta") as beta,
        connect(server) as nobody,
    ):
        running = alpha.generate("a", LONG, CallOptions(request_id="hers"), timeout_s=WAIT_S)
        next(running)
        with pytest.raises(RequestFailed) as caught:
            nobody.abort("hers")
        assert caught.value.status is Status.UNAUTHENTICATED
        next(running)
        beta.abort("hers")
        for _ in range(5):
            assert not next(running).finish_reason
        alpha.abort("hers")
        assert list(running)[-1].finish_reason == pb.FINISH_REASON_ABORT


def test_one_call_aborts_a_bounded_number() -> None:
    with served(serve_bytes()) as server, connect(server) as client:
        client.abort(*map(str, range(MAX_ABORT_IDS)))
        with pytest.raises(RequestFailed, match=rf"at most {MAX_ABORT_IDS} requests, this one names") as caught:
            client.abort(*["x"] * (MAX_ABORT_IDS + 1))
        assert caught.value.status is Status.INVALID


# ---- time ------------------------------------------------------------------------------------------------------------


class ArrivalClock(ManualClock):
    """Tells when somebody has looked at it."""

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Event()

    def __call__(self) -> float:
        self.read.set()
        return super().__call__()


def test_the_time_of_a_request_counts_while_it_waits_to_be_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(serve_bytes()) as server, connect(server) as client:
        go_on, prepare = threading.Event(), server.engine.prepare
        entered = threading.Semaphore(0)

        def slow(*args, **options):
            entered.release()
            assert go_on.wait(WAIT_S)
            return prepare(*args, **options)

        monkeypatch.setattr(server.engine, "prepare", slow)
        busy = [threading.Thread(target=lambda: client.complete("a", SHORT, timeout_s=WAIT_S)) for _ in range(2)]
        for thread in busy:  # all threads that encode
            thread.start()
            assert entered.acquire(timeout=WAIT_S)
        clock = ArrivalClock()
        monkeypatch.setattr(grpc_service, "time", SimpleNamespace(monotonic=clock))
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(client.complete, "a", SHORT, CallOptions(timeout_s=30.0), timeout_s=WAIT_S)
            assert clock.read.wait(WAIT_S), "it has arrived"
            clock.advance(30.0)
            go_on.set()
            with pytest.raises(RequestFailed, match=r"the 30 s of the request were over before its prompt") as caught:
                late.result()
        assert caught.value.status is Status.DEADLINE
        for thread in busy:
            thread.join(WAIT_S)


async def test_a_large_answer_is_serialised_in_turns() -> None:
    entries = tuple(TokenLogprobs(k, -1.0, 1, tuple(range(20)), (-0.5,) * 20) for k in range(3000))
    request = Request(
        request_id="r", prompt_token_ids=tuple(range(3001)), sampling=SamplingParams(), max_tokens=1, seed=0
    )
    update = Update("r", 0, (1,), "x", logprobs=entries, prompt=PromptInfo(0, entries))
    others = 0

    async def go_on() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(go_on())
    written = await Replies(request, False, Turns()).build(update)
    task.cancel()
    reply = pb.GenerateResponse.FromString(written)
    assert [e.token_id for e in reply.prompt.prompt_logprobs] == list(range(3000))
    assert [e.token_id for e in reply.logprobs] == list(range(3000))
    assert (reply.prompt.num_prompt_tokens, reply.text, reply.token_ids) == (3001, "x", [1])
    assert others > 20
