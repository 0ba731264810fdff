"""Options and answers with very many items: made off the event loop, or in turns, whatever route they come by."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_parts import browse, http_served
from serve_parts import Served

from jaxserve.engine import Reranker
from jaxserve.serve.http import completions, responses_api, sampling
from jaxserve.serve.http.pieces import PART_BYTES
from jaxserve.serve.turns import Turns
from jaxserve.testing import ByteTokenizer

MANY = 4000


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    reranker = Reranker(template="{instruction}{query} {document}", instruction="", yes_id=121, no_id=110)
    server = Served(tokenizer=ByteTokenizer(), vocab_size=259, reranker=reranker)
    with http_served(server) as parts, browse(parts) as client:
        yield client


@pytest.fixture
def num_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each piece that waited for its turn."""
    taken: list[int] = []
    following = Turns.next

    async def counted(self: Turns) -> None:
        taken.append(threading.get_ident())
        await following(self)

    monkeypatch.setattr(Turns, "next", counted)
    return taken


def test_options_of_a_completion_are_checked_off_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    check = sampling.completion_sampling

    def noted(body: Any) -> Any:
        threads.append(threading.current_thread().name)
        return check(body)

    monkeypatch.setattr(completions, "completion_sampling", noted)
    body = {"prompt": "a", "max_tokens": 1}
    assert client.post("/v1/completions", json=body).status_code == 200
    refused = client.post("/v1/completions", json={**body, "stop_token_ids": list(range(MANY))})
    assert refused.status_code == 400 and "stop_token_ids" in refused.json()["error"]["message"]
    assert len(threads) == 2 and all(name.startswith("jaxserve-encode") for name in threads)


def test_messages_of_a_response_are_made_off_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    make = responses_api.messages_of

    def noted(body: Any) -> Any:
        threads.append(threading.current_thread().name)
        return make(body)

    monkeypatch.setattr(responses_api, "messages_of", noted)
    body = {"input": [{"role": "user", "content": "a"}] * 3, "max_output_tokens": 1}
    assert client.post("/v1/responses", json=body).status_code == 200
    assert len(threads) == 1 and threads[0].startswith("jaxserve-encode")


def test_an_answer_that_is_kept_is_written_in_turns_and_its_conversation_off_the_event_loop(
    client: httpx.Client, num_turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    write = responses_api._written

    def noted(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return write(*given)

    monkeypatch.setattr(responses_api, "_written", noted)
    tools = [{"type": "web_search", "name": "n" * 200}] * 1500  # left out of the prompt, and repeated in the answer
    asked = {"input": [{"role": "user", "content": "a"}] * 3, "tools": tools, "max_output_tokens": 1}
    taken: dict[bool, int] = {}
    for store in (False, True):
        num_turns.clear()
        answer = client.post("/v1/responses", json={**asked, "store": store})
        assert answer.status_code == 200, answer.text
        taken[store] = len(num_turns)
    assert len(answer.content) > 4 * PART_BYTES
    assert taken[True] >= 2 * taken[False] >= 6, "once to keep it, once to send it"
    assert len(threads) == 1 and threads[0].startswith("jaxserve-encode")
    assert client.get(f"/v1/responses/{answer.json()['id']}").content == answer.content
    followed = {"input": "b", "previous_response_id": answer.json()["id"], "max_output_tokens": 1}
    longer = client.post("/v1/responses", json=followed).json()["usage"]["input_tokens"]
    assert longer > answer.json()["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "q", "documents": ["a" * 100] * 700}),
        ("/v1/score", {"text_1": "q", "text_2": ["a"] * 1600}),
    ],
)
def test_many_scores_are_written_in_turns(
    client: httpx.Client, num_turns: list[int], path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) > PART_BYTES
    assert len(num_turns) >= len(answer.content) // (2 * PART_BYTES) + 1
