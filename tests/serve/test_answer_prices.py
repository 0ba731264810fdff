"""What an answer can come to is reckoned before anything of it is queued, at both doors."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve_parts import WAIT_S, Served, connect, serve_bytes, served, wait_until

from jaxserve.api import Request, SamplingParams
from jaxserve.client import Client, RequestFailed
from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.engine.prices import answer_bytes, check_answer
from jaxserve.errors import InvalidRequest, Status
from jaxserve.serve.convert import CallOptions

MOST = 2**15
IDS = [number % 100 for number in range(100)]
SETTING = "serve.max_answer_bytes"

# Fields of a completion and whether its answer is more than MOST. The prompt has 100 tokens.
CALLS: list[tuple[dict[str, Any], bool]] = [
    ({"max_tokens": 1}, False),
    ({"max_tokens": 10, "n": 8}, False),
    ({"max_tokens": 103, "n": 40}, True),
    ({"max_tokens": 20, "logprobs": 20}, False),
    ({"max_tokens": 25, "logprobs": 20}, True),
    ({"max_tokens": 13, "n": 2, "logprobs": 19}, True),
    ({"max_tokens": 1, "n": 16, "prompt_logprobs": 3}, False),
    ({"max_tokens": 1, "prompt_logprobs": 5}, True),
]
USER = {"messages": [{"role": "user", "content": "a"}]}
HTTP_CALLS: list[tuple[str, dict[str, Any], bool]] = [
    *(("/v1/completions", {"prompt": IDS, **fields}, too_large) for fields, too_large in CALLS),
    ("/v1/completions", {"prompt": IDS, "max_tokens": 1, "n": 2, "echo": True, "logprobs": 1}, False),
    ("/v1/completions", {"prompt": IDS, "max_tokens": 1, "n": 3, "echo": True, "logprobs": 1}, True),
    ("/v1/completions", {"prompt": IDS, "max_tokens": 0, "n": 3, "echo": True, "logprobs": 1}, True),
    ("/v1/completions", {"prompt": [IDS] * 2, "max_tokens": 1, "prompt_logprobs": 1}, False),
    ("/v1/completions", {"prompt": [IDS] * 3, "max_tokens": 1, "prompt_logprobs": 1}, True),
    ("/v1/chat/completions", {**USER, "max_tokens": 20, "n": 2}, False),
    ("/v1/chat/completions", {**USER, "max_tokens": 30, "logprobs": True, "top_logprobs": 20}, True),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    parts = serve_bytes()
    http = HttpConfig(port=0, header_timeout_s=WAIT_S, body_timeout_s=WAIT_S)
    with served(parts, grpc_config=GrpcConfig(port=0), http_config=http, max_answer_bytes=MOST):
        yield parts


@pytest.fixture
def grpc_client(server: Served) -> Iterator[Client]:
    with connect(server) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "too_large"), HTTP_CALLS)
def test_over_http(server: Served, path: str, body: dict[str, Any], too_large: bool, stream: bool) -> None:
    with httpx.Client(base_url=server.http_url, timeout=WAIT_S) as client:
        answer = client.post(path, json={**body, "stream": stream, "ignore_eos": True})
    assert answer.status_code == (400 if too_large else 200), answer.text
    if too_large:
        message = answer.json()["error"]["message"]
        assert SETTING in message and str(MOST) in message
        assert server.engine.load[:2] == (0, 0)


@pytest.mark.parametrize(("fields", "too_large"), CALLS)
def test_over_grpc(server: Served, grpc_client: Client, fields: dict[str, Any], too_large: bool) -> None:
    sampling = SamplingParams(ignore_eos=True, **fields)
    if too_large:
        with pytest.raises(RequestFailed, match=SETTING) as caught:
            grpc_client.complete(IDS, sampling, timeout_s=WAIT_S)
        assert caught.value.status is Status.INVALID
    else:
        assert len(grpc_client.complete(IDS, sampling, timeout_s=WAIT_S).outputs) == sampling.n
    wait_until(lambda: server.engine.load[:2] == (0, 0), "nothing is left")


def test_an_echo_over_grpc_has_the_numbers_of_its_prompt_once(grpc_client: Client) -> None:
    sampling = SamplingParams(max_tokens=1, n=16, prompt_logprobs=3)
    completion = grpc_client.complete(IDS, sampling, CallOptions(echo=True), timeout_s=WAIT_S)
    assert len(completion.outputs) == 16


def make_request(**fields: Any) -> Request:
    sampling = SamplingParams(**fields)
    assert sampling.max_tokens is not None
    return Request(
        request_id="r", prompt_token_ids=tuple(IDS), sampling=sampling, max_tokens=sampling.max_tokens, seed=0
    )


def test_what_is_counted() -> None:
    plain = answer_bytes(make_request(max_tokens=10))
    assert answer_bytes(make_request(max_tokens=10, n=3)) == 3 * plain
    entry = answer_bytes(make_request(max_tokens=10, logprobs=0)) - plain
    assert answer_bytes(make_request(max_tokens=10, logprobs=4)) - plain == 5 * entry
    prompt = make_request(max_tokens=10, n=3, prompt_logprobs=1)
    once, each = answer_bytes(prompt), answer_bytes(prompt, repeats_prompt=True)
    assert each - 3 * plain == 3 * (once - 3 * plain) == 3 * 2 * 100 * entry // 10


def test_a_refusal_names_what_was_asked() -> None:
    large = make_request(max_tokens=1000, n=128, logprobs=20)
    check_answer([large], answer_bytes(large))
    with pytest.raises(InvalidRequest, match=r"100 tokens of the prompt, max_tokens 1000, n 128, logprobs 20 can"):
        check_answer([large], answer_bytes(large) - 1)
    with pytest.raises(InvalidRequest, match=r"2 prompts, the largest of them with .* n 128"):
        check_answer([make_request(max_tokens=1), large], answer_bytes(large))


def test_a_long_context_with_all_alternatives_is_taken_by_default() -> None:
    check_answer([make_request(max_tokens=131072, logprobs=20)], ServeConfig().max_answer_bytes)
