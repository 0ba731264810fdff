"""Texts of megabytes at the doors: nobody's encoding thread is held by one that could not be taken."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_parts import browse
from serve_parts import WAIT_S, Served, connect, served

from jaxserve.api import SamplingParams
from jaxserve.client import RequestFailed
from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.engine import Reranker
from jaxserve.errors import Status
from jaxserve.testing import ByteTokenizer

LONG = "a" * 2_000_000
USER = {"role": "user", "content": LONG}


class Recording(ByteTokenizer):
    """Remembers the longest text that it was asked to encode."""

    longest = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.longest = max(self.longest, len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    judges = Reranker(template="{query} {document}", instruction="", yes_id=ord("y"), no_id=ord("n"))
    parts = Served(tokenizer=Recording(), reranker=judges)
    http = HttpConfig(port=0, header_timeout_s=WAIT_S, body_timeout_s=WAIT_S)
    with served(parts, grpc_config=GrpcConfig(port=0), http_config=http):
        yield parts


@pytest.fixture
def tokenizer(server: Served) -> Recording:
    tokenizer = server.engine.tokenizer
    assert isinstance(tokenizer, Recording)
    tokenizer.longest = 0
    return tokenizer


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with browse(server) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["a", LONG]}),
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"<s>{LONG}"}]}),
        ("/v1/messages", {"model": "fake", "max_tokens": 1, "messages": [USER]}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/embeddings", {"input": LONG}),
        ("/rerank", {"query": "a", "documents": ["b", LONG]}),
    ],
)
def test_a_prompt_is_refused_by_its_beginning(
    client: httpx.Client, tokenizer: Recording, path: str, body: dict[str, Any]
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert "a sequence holds 512" in response.text
    assert 0 < tokenizer.longest <= 2**14


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [USER]}),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": [USER]}),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 8}),
        ("/v1/completions", {"prompt": [LONG[: 2**19 + 1]] * 2, "truncate_prompt_tokens": 8}),
        ("/v1/chat/completions", {"messages": [USER], "truncate_prompt_tokens": 8}),
        ("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": 8}),
        ("/rerank", {"query": "a", "documents": [LONG], "max_tokens_per_doc": 8}),
    ],
)
def test_what_is_encoded_whatever_it_has_is_bounded_by_characters(
    client: httpx.Client, tokenizer: Recording, path: str, body: dict[str, Any]
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert "serve.max_text_chars" in response.text
    assert tokenizer.longest == 0


def test_what_is_within_the_bound_is_counted_and_cut(client: httpx.Client) -> None:
    text = "a" * 2**20
    assert client.post("/tokenize", json={"prompt": text}).json()["count"] == 2**20 + 1
    cut = client.post("/v1/completions", json={"prompt": text, "truncate_prompt_tokens": 8, "max_tokens": 1})
    assert cut.json()["usage"]["prompt_tokens"] == 8


def test_the_same_over_grpc(server: Served, tokenizer: Recording) -> None:
    with connect(server) as client:
        for prompt in (LONG, [USER], [{"role": "user", "content": f"<s>{LONG}"}]):
            with pytest.raises(RequestFailed, match="a sequence holds 512") as caught:
                list(client.generate(prompt, SamplingParams(max_tokens=1)))
            assert caught.value.status is Status.INVALID
            with pytest.raises(RequestFailed, match=r"serve\.max_text_chars"):
                client.tokenize(prompt)
            with pytest.raises(RequestFailed, match=r"serve\.max_text_chars"):
                list(client.generate(prompt, SamplingParams(max_tokens=1, truncate_prompt_tokens=8)))
    assert tokenizer.longest <= 2**14
