"""Rerank and score over HTTP, in the shapes of Jina, Cohere and vLLM, on the fake engine.

Its answer follows from a document's last letter: after an x it says y, whose probability it then makes equal to that of
n; after an m it says n.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_parts import browse, http_served
from serve_parts import Served

from jaxserve.engine import Reranker, encode_pairs
from jaxserve.serve.http import requests
from jaxserve.testing import ByteTokenizer

NO, YES = b"ny"
LOW = 1 / (1 + math.exp(YES - NO))
RERANKER = Reranker(template="{instruction}{query} {document}", instruction="", yes_id=YES, no_id=NO)
ASK = {"model": "fake", "query": "q", "documents": ["am", "bx", {"text": "cm"}, "dx"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with http_served(Served(tokenizer=ByteTokenizer(), vocab_size=259, reranker=RERANKER)) as parts:
        yield parts
    parts.scheduler.check()
    assert parts.scheduler.num_held_pages == 0


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with browse(server) as client:
        yield client


def refusal(client: httpx.Client, path: str, **body: Any) -> str:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json=ASK, headers={"x-request-id": "mine"}).json()
    assert [found["index"] for found in answer["results"]] == [1, 3, 0, 2], "equals stay in their order"
    assert [found["relevance_score"] for found in answer["results"]] == pytest.approx([0.5, 0.5, LOW, LOW])
    assert answer["usage"] == {"prompt_tokens": 16, "completion_tokens": 0, "total_tokens": 16}
    assert (answer["model"], answer["id"][:5]) == ("fake", "mine-")
    texts = [found.get("document") for found in answer["results"]]
    assert texts == ([None] * 4 if path == "/v2/rerank" else [{"text": text} for text in ("bx", "dx", "am", "cm")])


def test_the_most_relevant_alone_with_or_without_its_text(client: httpx.Client) -> None:
    for shows in (True, False):
        body = {**ASK, "top_n": 1, "return_documents": shows, "user": "u", "rank_fields": ["text"], "newest": None}
        for path in ("/v1/rerank", "/v2/rerank"):
            (best,) = client.post(path, json=body).json()["results"]
            assert ("document" in best, best["index"]) == (shows, 1)
    for top_n in (0, 99):
        assert len(client.post("/rerank", json={**ASK, "top_n": top_n}).json()["results"]) == 4


def test_score(client: httpx.Client) -> None:
    for queries, documents in (("q", ["x", "m"]), (["p", "q"], ["x", "m"])):
        answer = client.post("/score", json={"text_1": queries, "text_2": documents}).json()
        assert [(found["index"], found["object"]) for found in answer["data"]] == [(0, "score"), (1, "score")]
        assert [found["score"] for found in answer["data"]] == pytest.approx([0.5, LOW])
        assert (answer["object"], answer["model"]) == ("list", "fake")
    (one,) = client.post("/v1/score", json={"text_1": "q", "text_2": "m"}).json()["data"]
    assert one["score"] == pytest.approx(LOW)


def test_long_documents_are_cut_or_named(client: httpx.Client) -> None:
    body = {"query": "q", "documents": ["m", "x" + "m" * 600]}
    assert refusal(client, "/rerank", **body).startswith("documents[1]: template, query and document have 603 tokens")
    scores = client.post("/rerank", json={**body, "max_tokens_per_doc": 1, "return_documents": True}).json()["results"]
    assert [(found["index"], found["relevance_score"]) for found in scores] == [
        (1, pytest.approx(0.5)),
        (0, pytest.approx(LOW)),
    ]
    assert scores[0]["document"]["text"] == body["documents"][1], "as it was sent"


def test_special_tokens_in_documents_are_text_or_refused(client: httpx.Client) -> None:
    marked = {"query": "q", "documents": ["x", "<|chat|>"]}
    assert client.post("/rerank", json=marked).status_code == 200
    pairs = [("a</s>", "<|ch"), ("q", "x")]
    judged = encode_pairs(RERANKER, ByteTokenizer(), pairs, "documents", max_model_len=600)
    assert all(max(judgement.prompt_ids) < 256 for judgement in judged)
    parts = Served(tokenizer=ByteTokenizer(), vocab_size=259, reranker=RERANKER)
    with http_served(parts, refuse_special_text=True) as server, browse(server) as strict:
        assert refusal(strict, "/rerank", **marked) == "documents[1] contains the special token '<|chat|>'; take it out"
        assert refusal(strict, "/rerank", **{**ASK, "query": "</s>"}).startswith("query contains the special token")


def test_what_is_refused(client: httpx.Client) -> None:
    assert refusal(client, "/rerank", query="q", documents=[]) == "1 queries and 0 documents; send one of each at least"
    assert "2 queries and 3 documents" in refusal(client, "/score", text_1=["p", "q"], text_2=["x", "y", "z"])
    assert "serve.max_prompts" in refusal(client, "/v1/rerank", query="q", documents=["x"] * 2049)
    assert refusal(client, "/rerank", query="q", documents=["x", 5]).startswith("documents[1]")
    assert refusal(client, "/rerank", query="q", documents=["x"], top_n=-1).startswith("top_n")
    assert refusal(client, "/score", text_1="p", text_2="q", truncate_prompt_tokens=5).startswith("truncate_prompt")
    assert refusal(client, "/score", text_1="p", text_2="q", priority=3).startswith("priority is 3")
    assert client.post("/rerank", json={**ASK, "model": "rerank-v3.5"}).status_code == 404


def test_a_model_that_is_not_known_to_judge(server: Served, client: httpx.Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(server.engine, "model", dataclasses.replace(server.engine.model, reranker=None))
    for path, body in (("/rerank", ASK), ("/v1/score", {"text_1": "a", "text_2": "b"})):
        message = refusal(client, path, **body)
        assert message.startswith("this model is not known to judge documents") and "rerank.template" in message


def test_null_is_absent(client: httpx.Client) -> None:
    nulls = dict.fromkeys(set(requests.RerankRequest.model_fields) - {"query", "documents"})
    plain, same = (client.post("/rerank", json={**more, **ASK}).json()["results"] for more in ({}, nulls))
    assert plain == same
