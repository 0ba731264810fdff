"""`jaxserve.v1.Inference/Generate` over loopback: what a client reads, and what it is refused."""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from serve_parts import WAIT_S, Served, connect, note_prepared, serve_bytes, served, wait_until

from jaxserve.api import FinishReason, SamplingParams
from jaxserve.client import AsyncClient, Client, RequestFailed
from jaxserve.config.schema import GrpcConfig
from jaxserve.errors import InvalidRequest, Status
from jaxserve.serve.convert import CallOptions
from jaxserve.serve.gen import inference_pb2 as pb

MAX_REQUEST_BYTES = GrpcConfig().max_message_bytes
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """The token after t is t + 1; position 3 of request `ended` is end-of-sequence."""
    with served(serve_bytes(forced={("ended", 0): {3: 257}})) as parts:
        yield parts


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with connect(server) as client:
        yield client


def test_text_streams_token_by_token(client: Client) -> None:
    replies = list(client.generate("a", GREEDY, timeout_s=WAIT_S))
    assert [r.text for r in replies] == ["b", "c", "d", "e", "f"]
    assert [list(r.token_ids) for r in replies] == [[98], [99], [100], [101], [102]]
    assert [r.finish_reason for r in replies] == [0, 0, 0, 0, pb.FINISH_REASON_LENGTH]
    assert [r.HasField("prompt") for r in replies] == [True, False, False, False, False]
    assert [r.HasField("usage") for r in replies] == [False, False, False, False, True]
    assert replies[0].prompt.num_prompt_tokens == 2  # the begin token and one byte
    assert not replies[0].prompt.token_ids
    assert replies[-1].usage.num_generated_tokens == 5
    assert len({r.request_id for r in replies}) == 1
    assert replies[0].request_id


def test_token_ids_in_and_out(client: Client) -> None:
    completion = client.complete([10, 20], GREEDY, CallOptions(request_id="mine"), timeout_s=WAIT_S)
    assert completion.outputs[0].token_ids == (21, 22, 23, 24, 25)
    assert completion.request_id == "mine"
    assert completion.num_prompt_tokens == 2


def test_chat_messages_are_rendered_by_the_template(client: Client) -> None:
    completion = client.complete([{"role": "user", "content": "hi"}], GREEDY, CallOptions(echo=True), timeout_s=WAIT_S)
    assert completion.text.startswith("user: hi\nassistant:")
    assert completion.num_prompt_tokens == len("?user: hi\n?assistant: ")  # each tag is one token, no begin token


def test_several_sequences(client: Client) -> None:
    replies = list(client.generate("a", SamplingParams(temperature=0.0, max_tokens=3, n=3), timeout_s=WAIT_S))
    for index in range(3):
        assert "".join(r.text for r in replies if r.index == index) == "bcd"
    assert [r.HasField("prompt") for r in replies].count(True) == 1
    assert replies[0].HasField("prompt")
    assert [r.HasField("usage") for r in replies] == [False] * (len(replies) - 1) + [True]
    assert replies[-1].usage.num_generated_tokens == 9


def test_echo_returns_the_prompt(client: Client) -> None:
    replies = list(client.generate("xa", GREEDY, CallOptions(echo=True), timeout_s=WAIT_S))
    assert "".join(r.text for r in replies) == "xabcdef"
    assert list(replies[0].prompt.token_ids) == [256, 120, 97]


def test_logprobs(client: Client) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=2, logprobs=2, prompt_logprobs=1)
    completion = client.complete([5, 6, 7], sampling, timeout_s=WAIT_S)
    assert [(e.token_id, e.logprob, e.rank, e.top_ids) for e in completion.outputs[0].logprobs] == [
        (8, -0.5, 1, (8, 9)),
        (9, -0.5, 1, (9, 10)),
    ]
    assert [(e.token_id, e.top_ids) for e in completion.prompt_logprobs] == [(6, (6,)), (7, (7,))]


def test_no_logprobs_unless_asked(client: Client) -> None:
    completion = client.complete([5, 6], GREEDY, timeout_s=WAIT_S)
    assert completion.outputs[0].logprobs == ()
    assert completion.prompt_logprobs == ()


@pytest.mark.parametrize(("include", "text"), [(False, "bcd"), (True, "bcdefg")])
def test_stop_strings(client: Client, include: bool, text: str) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=50, stop=["zzz", "efg"], include_stop_str_in_output=include)
    (output,) = client.complete("a", sampling, timeout_s=WAIT_S).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == (text, FinishReason.STOP, "efg")


def test_stop_token_ids_and_end_of_sequence(client: Client) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=50, stop_token_ids=[100])
    (output,) = client.complete("a", sampling, timeout_s=WAIT_S).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("bc", FinishReason.STOP, 100)
    (output,) = client.complete(
        "a", SamplingParams(temperature=0.0, max_tokens=50), CallOptions(request_id="ended"), timeout_s=WAIT_S
    ).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("bcd", FinishReason.STOP, None)


def test_null_max_tokens_fills_the_context(client: Client, server: Served) -> None:
    completion = client.complete([1], SamplingParams(temperature=0.0, max_tokens=None), timeout_s=WAIT_S)
    assert completion.num_generated_tokens == server.engine.model.max_model_len - 1
    assert completion.outputs[0].finish_reason is FinishReason.LENGTH


def test_tenant_and_targets_arrive(client: Client, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = note_prepared(server, monkeypatch)
    client.complete([1], GREEDY, CallOptions(tenant="t", ttft_target_s=0.5, tpot_target_s=0.25), timeout_s=WAIT_S)
    client.complete([1], GREEDY, timeout_s=WAIT_S)
    assert [(r.tenant, r.ttft_target_s, r.tpot_target_s) for r in prepared] == [("t", 0.5, 0.25), ("", None, None)]


def test_a_cached_prompt_is_reported(client: Client) -> None:
    prompt = [(7 * i) % 120 for i in range(40)]
    first = client.complete(prompt, GREEDY, CallOptions(cache_salt="one"), timeout_s=WAIT_S)
    again = client.complete(prompt, GREEDY, CallOptions(cache_salt="one"), timeout_s=WAIT_S)
    other = client.complete(prompt, GREEDY, CallOptions(cache_salt="two"), timeout_s=WAIT_S)
    assert (first.num_cached_tokens, again.num_cached_tokens, other.num_cached_tokens) == (0, 32, 0)
    assert first.outputs == again.outputs == other.outputs


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (pb.GenerateRequest(), "no prompt"),
        (pb.GenerateRequest(text=""), None),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "empty"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 259])), "259 is outside the vocabulary"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "-1 is outside"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 512)), "512 tokens"),
        (pb.GenerateRequest(chat=pb.ChatMessages()), "messages"),
        (pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(content="x")])), "role"),
        (pb.GenerateRequest(text="a", request_id="x" * 257), "257 characters"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=float("nan"))), "temperature"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=0)), "max_tokens is 0"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=512)), "ask for at most 510"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(logprobs=21)), "logprobs is 21"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(logit_bias={700: 1.0})), "700"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(seed=-1)), "seed is -1"),
        (pb.GenerateRequest(text="a", ttft_target_s=0.0), "ttft_target_s is 0.0"),
        (pb.GenerateRequest(text="a", tpot_target_s=float("nan")), "tpot_target_s is nan"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(server: Served, request_: pb.GenerateRequest, text: str | None):
    """An empty text is a prompt all the same: it has the begin token."""
    code, details = _raw_call(server, request_.SerializeToString())
    if text is None:
        assert code is grpc.StatusCode.OK
        return
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert text in details


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\x12\x02\xff\xfe", "UTF-8"),  # field 2, the text, two bytes that are none
        (b"\x12\x7fabc", "cannot be decoded"),  # promises more bytes than there are
        (b"\x12\x01a\x98\x06\x01", "no field 99"),
    ],
)
def test_bytes_that_are_no_request(server: Served, raw: bytes, text: str) -> None:
    code, details = _raw_call(server, raw)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert text in details


def test_a_refusal_with_a_long_text_still_arrives(server: Served) -> None:
    """gRPC clients take 8 KiB of trailers; more would arrive as an error of another kind."""
    unknown = b"".join(bytes([0x80 | (n << 3 & 0x7F), 0x80 | (n >> 4 & 0x7F), n >> 11, 1]) for n in range(3000, 9000))
    code, details = _raw_call(server, b"\x12\x01a" + unknown)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert "no field 3000, 3001" in details


def test_a_message_over_the_size_limit_is_refused(server: Served, client: Client) -> None:
    code, details = _raw_call(server, pb.GenerateRequest(text="a" * MAX_REQUEST_BYTES).SerializeToString())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_REQUEST_BYTES) in details
    assert client.complete("a", GREEDY, timeout_s=WAIT_S).text == "bcdef"


def test_the_client_raises_the_kind_of_the_error(client: Client) -> None:
    with pytest.raises(RequestFailed, match="outside the vocabulary") as caught:
        client.complete([999], GREEDY, timeout_s=WAIT_S)
    assert caught.value.status is Status.INVALID
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        client.complete("a", SamplingParams(stop_token_ids=[2**40]), timeout_s=WAIT_S)


def test_a_live_id_is_refused_and_the_first_unharmed(client: Client, server: Served) -> None:
    twin = CallOptions(request_id="twin")
    with ThreadPoolExecutor() as pool:
        server.runner.hold()
        try:
            first = pool.submit(client.complete, "a", GREEDY, twin, timeout_s=WAIT_S)
            wait_until(lambda: server.engine.num_live == 1, "the first request is live")
            second = pool.submit(client.complete, "m", SamplingParams(n=2), twin, timeout_s=WAIT_S)
            wait_until(lambda: server.engine.num_unstarted == 2, "the second is in the inbox")
        finally:
            server.runner.release()
        with pytest.raises(RequestFailed, match="live already") as caught:
            second.result()
        assert caught.value.status is Status.INVALID
        assert first.result().text == "bcdef"
    assert client.complete("m", GREEDY, twin, timeout_s=WAIT_S).text == "nopqr", "free again"


async def test_a_hundred_streams_are_not_mixed_up() -> None:
    """Tokens are a hash of the whole context, so no two streams agree by chance."""

    def expected(prompt: list[int], seed: int, num_tokens: int) -> tuple[int, ...]:
        context = list(prompt)
        for _ in range(num_tokens):
            context.append(hash((seed, *context)) % 128)
        return tuple(context[len(prompt) :])

    with served(serve_bytes(mode="context", max_rows=16)) as server:
        async with AsyncClient(server.address) as client:
            prompts = [[i, (3 * i) % 128, 7] for i in range(100)]
            lengths = [5 + (i * 7) % 40 for i in range(100)]
            completions = await asyncio.wait_for(
                asyncio.gather(
                    *(
                        client.complete(
                            prompts[i],
                            SamplingParams(seed=i, max_tokens=lengths[i], ignore_eos=True),
                            CallOptions(request_id=f"{i}"),
                        )
                        for i in range(100)
                    )
                ),
                2 * WAIT_S,
            )
            for i, completion in enumerate(completions):
                assert completion.request_id == f"{i}"
                assert completion.outputs[0].token_ids == expected(prompts[i], i, lengths[i])
                assert completion.text == bytes(completion.outputs[0].token_ids).decode()
        server.scheduler.check()
        assert server.scheduler.num_held_pages == 0


def _raw_call(server: Served, raw: bytes) -> tuple[grpc.StatusCode, str]:
    """Sends bytes that no client of ours would; returns how the call ended."""
    with grpc.insecure_channel(server.address, options=(("grpc.max_send_message_length", -1),)) as channel:
        call = channel.unary_stream("/jaxserve.v1.Inference/Generate")(raw, timeout=WAIT_S)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return call.code(), call.details()


def test_a_priority_or_an_echo_without_effect_is_refused(client: Client) -> None:
    """The server's policy is fcfs."""
    silent = SamplingParams(temperature=0.0, max_tokens=5, detokenize=False)
    with pytest.raises(RequestFailed, match="priority needs sched.policy: priority") as caught:
        client.complete("a", GREEDY, CallOptions(priority=1), timeout_s=WAIT_S)
    assert caught.value.status is Status.INVALID
    with pytest.raises(RequestFailed, match="echo needs text, but detokenize is false") as caught:
        client.complete("a", silent, CallOptions(echo=True), timeout_s=WAIT_S)
    assert caught.value.status is Status.INVALID
