"""Answers that are made and sent in pieces: the bytes are the same, and others have their turn between two pieces."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pydantic
import pytest
from http_parts import browse, http_served
from serve_parts import Served, serve_bytes

from jaxserve.serve.http.logprobs import CompletionLogprobsBuilder
from jaxserve.serve.http.pieces import PART_BYTES, WrittenList, in_parts, json_pieces, write_parts
from jaxserve.serve.http.responses import (
    ChatLogprob,
    ChatResponse,
    CompletionLogprobs,
    CompletionResponse,
    Embedding,
    EmbeddingResponse,
    TokenizeResponse,
    TopLogprob,
    Usage,
)
from jaxserve.serve.turns import Turns

IDS = [number % 100 for number in range(400)]
ECHO = {"prompt": IDS, "max_tokens": 2, "n": 8, "echo": True, "logprobs": 20}
USER = {"messages": [{"role": "user", "content": "a long prompt " * 30}]}


@pytest.fixture(scope="module")
def parts() -> Iterator[Served]:
    with http_served(serve_bytes(max_model_len=2048, num_pages=2048)) as parts:
        yield parts


@pytest.fixture
def client(parts: Served) -> Iterator[httpx.Client]:
    with browse(parts) as client:
        yield client


VALUES = (0.0, -0.0, -1.5, 1e-7, -12.345678901234567, 1e22, 1 / 3, 5e-324, -9999.0, float("inf"), 3)
VECTOR = Embedding(index=0, embedding=[number / 7 for number in range(10_000)])
TOP = [TopLogprob(token='\x00é\u2028"', logprob=value, bytes=[1, 255]) for value in VALUES]
MODELS: list[pydantic.BaseModel] = [
    Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3),
    EmbeddingResponse(data=[VECTOR, VECTOR, Embedding(index=2, embedding="text")], model="m", usage=Usage(
        prompt_tokens=1, completion_tokens=0, total_tokens=1)),
    EmbeddingResponse(data=[], model="é", usage=Usage(prompt_tokens=1, completion_tokens=0, total_tokens=1)),
    TokenizeResponse(count=1, max_model_len=2, tokens=list(range(9000)), token_strs=["é\n"] * 5000),
    TokenizeResponse(count=0, max_model_len=2, tokens=[]),
    ChatLogprob(token="a", logprob=-1.0, bytes=None, top_logprobs=TOP),
    CompletionLogprobs(
        tokens=["a"] * 3, token_logprobs=[None, *VALUES], top_logprobs=[None, {"é\"": 1e-9}, {}], text_offset=[1, 2, 3]
    ),
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_pieces_are_the_bytes_that_pydantic_writes(model: pydantic.BaseModel) -> None:
    assert b"".join(json_pieces(model)).decode() == model.model_dump_json(exclude_unset=True)


@pytest.mark.parametrize("items", [[], [None], list(VALUES), TOP, [{"a": TOP[0]}, None], [["x"], []]])
def test_a_written_list_is_the_list(items: list[Any]) -> None:
    whole, split, other = WrittenList(), WrittenList(), WrittenList()
    whole.add(items)
    split.add(items[:1])
    other.add(items[1:])
    split.extend(other)
    expected = b"".join(json_pieces({"list": items}))
    assert b"".join(json_pieces({"list": whole})) == b"".join(json_pieces({"list": split})) == expected


def test_parts_have_a_bounded_size() -> None:
    written = WrittenList()
    for number in range(50_000):
        written.add([number])
    parts = list(in_parts(json_pieces({"a": written})))
    assert len(parts) > 3 and all(PART_BYTES <= len(part) < PART_BYTES + 100 for part in parts[:-1])
    assert json.loads(b"".join(parts)) == {"a": list(range(50_000))}


@pytest.mark.parametrize(
    "fields", [{}, {"prompt_logprobs": 20}, {"return_tokens_as_token_ids": True}, {"max_tokens": 0}]
)
def test_a_large_completion(client: httpx.Client, fields: dict[str, Any]) -> None:
    answer = client.post("/v1/completions", json={**ECHO, **fields})
    assert answer.status_code == 200, answer.text
    assert len(answer.content) > 10 * PART_BYTES
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert CompletionResponse.model_validate_json(answer.content).model_dump_json(exclude_unset=True) == answer.text
    choices = answer.json()["choices"]
    num_tokens = len(IDS) + fields.get("max_tokens", 2)
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [num_tokens] * 8
    assert choices[0]["logprobs"]["tokens"] == choices[7]["logprobs"]["tokens"]
    assert [choice["logprobs"]["text_offset"][-1] + 1 for choice in choices] == [len(choices[0]["text"])] * 8


def test_a_large_stream_has_the_entries_of_the_whole_answer(client: httpx.Client) -> None:
    whole = client.post("/v1/completions", json=ECHO).json()["choices"]
    found: list[dict[str, list[Any]]] = [{} for _ in range(8)]
    stream = client.post("/v1/completions", json={**ECHO, "stream": True})
    events = [event.split("data: ", 1) for event in stream.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]]
    assert len(events) == 16
    for name, text in events:
        [choice] = json.loads(text)["choices"]
        assert name.startswith(f"id: {choice['index']}:") and name.endswith("\n")
        for field, values in choice["logprobs"].items():
            found[choice["index"]].setdefault(field, []).extend(values)
    assert found == [choice["logprobs"] for choice in whole]


def test_a_large_chat(client: httpx.Client) -> None:
    asked = {**USER, "max_tokens": 200, "logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20, "ignore_eos": True}
    answer = client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) > 4 * PART_BYTES
    assert ChatResponse.model_validate_json(answer.content).model_dump_json(exclude_unset=True) == answer.text
    [choice] = answer.json()["choices"]
    assert len(choice["logprobs"]["content"]) == 200
    stream = client.post("/v1/chat/completions", json={**asked, "stream": True})
    first, *rest = [json.loads(text.split("data: ", 1)[1]) for text in stream.text.split("\n\n")[:-2]]
    assert first["prompt_logprobs"] == answer.json()["prompt_logprobs"]
    told = [entry for chunk in rest for entry in (chunk["choices"][0].get("logprobs") or {"content": []})["content"]]
    assert told == choice["logprobs"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_made_once_for_all_sequences(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    made: list[int] = []
    write = CompletionLogprobsBuilder.write_prompt

    async def counted(self: CompletionLogprobsBuilder, entries: Any, *given: Any) -> Any:
        made.append(len(entries))
        return await write(self, entries, *given)

    monkeypatch.setattr(CompletionLogprobsBuilder, "write_prompt", counted)
    body = {**ECHO, "prompt": [IDS, IDS[:50]], "stream": stream}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert sorted(made) == [49, 399]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_made_in_turns(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Those of a step are as many as it has sequences, and each takes a millisecond."""
    taken: list[None] = []
    next_turn = Turns.next

    async def counted(self: Turns) -> None:
        taken.append(None)
        await next_turn(self)

    monkeypatch.setattr(Turns, "next", counted)
    body = {"prompt": "a", "n": 4, "max_tokens": 3, "ignore_eos": True, "stream": stream}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert not taken
    assert client.post("/v1/completions", json={**body, "logprobs": 5}).status_code == 200
    assert 4 <= len(taken) <= 4 * 3


def test_others_have_their_turn_between_two_parts() -> None:
    """All that is made at a time takes one turn each time the loop comes round, whosever it is."""
    rounds: list[list[str]] = []

    def pieces(name: str) -> Iterator[bytes]:
        for _ in range(5):
            rounds[-1].append(name)
            yield b"x" * PART_BYTES

    async def main() -> None:
        turns = Turns()
        rounds.append([])
        made = [asyncio.ensure_future(write_parts(turns, pieces(name))) for name in "abc"]
        cancelled = asyncio.ensure_future(write_parts(turns, pieces("d")))
        await asyncio.sleep(0)
        cancelled.cancel()
        while not all(one.done() for one in made):
            rounds.append([])
            await asyncio.sleep(0)
        assert [sum(map(len, one.result())) for one in made] == [5 * PART_BYTES] * 3

    asyncio.run(main())
    assert rounds[0] == ["a", "b", "c", "d"]
    assert all(len(names) <= 1 for names in rounds[1:])
    assert [name for names in rounds[1:] for name in names] == ["a", "b", "c"] * 4
