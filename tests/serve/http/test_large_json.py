"""Large JSON is read in pieces: values and refusals are those of the parser, and no piece is large. Lists are counted
before their items are looked at."""

import json
import random
from typing import Any

import pydantic
import pydantic_core
import pytest

from jaxserve.serve.http import large_json, requests
from jaxserve.serve.http.large_json import PIECE_BYTES, parse_json
from jaxserve.serve.http.messages_bodies import MessagesRequest
from jaxserve.serve.http.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from jaxserve.serve.http.responses import TokenizeResponse
from jaxserve.serve.http.responses_api_bodies import ResponsesRequest

ATOMS = [1, 2.5, None, True, "a", 'q"\\', "\\\\", "é,[]{}", "", -3e5, "\u4e00" * 5]
NAMES = ["a", '"', "\\", "b,", "{", "é"]
NOISE = b'[]{},:"\\ 1a'


def drawn(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 4 or kind < 0.3:
        return rng.choice(ATOMS)
    if kind < 0.65:
        return [drawn(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice(NAMES) + str(rng.randrange(4)): drawn(rng, depth + 1) for _ in range(rng.randrange(5))}


def damaged(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.randrange(3)):
        place = rng.randrange(len(changed))
        kind = rng.randrange(3)
        if kind:
            changed[place : place + kind - 1] = bytes([rng.choice(NOISE)])
        elif len(changed) > 1:
            del changed[place]
    return bytes(changed)


def read_by(parse: Any, text: bytes) -> Any:
    try:
        return repr(parse(text))
    except ValueError:
        return ValueError


def test_values_and_refusals_are_those_of_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "PIECE_BYTES", 6)
    monkeypatch.setattr(large_json, "_BLOCK_BYTES", 5)
    rng, told = random.Random(0), set[bool]()
    for _ in range(1500):
        value, indent = drawn(rng), rng.choice([None, None, 1])
        text = damaged(rng, json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=indent).encode())
        expected = read_by(lambda text: pydantic_core.from_json(text, allow_inf_nan=False), text)
        assert read_by(parse_json, text) == expected, text
        told.add(expected is ValueError)
    assert told == {True, False}


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": f"f{k}"}} for k in range(5000)]},
        {"logit_bias": {str(k): 1.0 for k in range(30_000)}},
        {"a": {"b": [{"c": list(range(50_000)), "d": "x" * 10}]}},
        {"stop": ['"\\' * 40] * 3000, "é" * 10: ["[" * 1000] * 200},
        [[[[[["a b " * 20] * 5000]]]]],
    ],
    ids=["tools", "biases", "nested", "texts", "lists"],
)
def test_no_piece_is_large(monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    sizes: list[int] = []
    parse = large_json._parse

    def noted(text: bytes) -> Any:
        sizes.append(len(text))
        return parse(text)

    monkeypatch.setattr(large_json, "_parse", noted)
    for text in (json.dumps(body).encode(), json.dumps(body, ensure_ascii=False, indent=1).encode()):
        sizes.clear()
        assert parse_json(text) == body
        assert max(sizes) <= PIECE_BYTES + 2 and sum(sizes) > len(text) * 0.9


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[" * 200 + ",".join(["1"] * 50_000) + "]" * 199, "bracket without its other half"),
        ("[" * 202 + "1" * PIECE_BYTES + "]" * 202, "more than 201 deep"),
        ("[" + "1," * 50_000 + "]", "comma too many|trailing comma"),
        ('{"a": [' + "1," * 50_000 + "x]}", "between the bytes"),
        ('{"a" [' + "1," * 50_000 + "1]}", "no name of a field"),
        ("[" + "1," * 50_000 + "1}", "not well-formed"),
    ],
)
def test_a_refusal_of_a_large_text_tells_the_place(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_json(text.encode())


MESSAGE, FOREIGN = {"role": "user", "content": "a"}, {"type": "web_search"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("kind", "name", "item", "most"),
    [
        (ChatRequest, "messages", MESSAGE, 2**14),
        (ChatRequest, "tools", TOOL, 2**11),
        (ChatRequest, "stop", "a", 2**14),
        (TokenizeRequest, "messages", MESSAGE, 2**14),
        (CompletionRequest, "prompt", "a", 2**14),
        (CompletionRequest, "prompt", [1], 2**14),
        (CompletionRequest, "resume", {"token_ids": [1]}, 2**14),
        (ResponsesRequest, "input", MESSAGE, 2**14),
        (ResponsesRequest, "tools", FOREIGN, 2**11),
        (MessagesRequest, "messages", MESSAGE, 2**14),
        (MessagesRequest, "tools", {"name": "f", "input_schema": {}}, 2**11),
        (EmbeddingRequest, "input", "a", 2**14),
        (RerankRequest, "documents", {"text": "a"}, 2**14),
        (ScoreRequest, "text_2", "a", 2**14),
    ],
)
def test_a_list_is_counted_before_its_items_are_made(
    monkeypatch: pytest.MonkeyPatch, kind: type[requests.Body], name: str, item: Any, most: int
) -> None:
    made: list[type[requests.Body]] = []
    names = requests.field_names

    def noted(body: type[requests.Body]) -> frozenset[str]:
        made.append(body)
        return names(body)

    monkeypatch.setattr(requests, "field_names", noted)
    with pytest.raises(pydantic.ValidationError) as refused:
        kind.model_validate({name: [item] * (most + 1)})
    texts = {each["msg"] for each in refused.value.errors()}
    assert f"List should have at most {most} items, not {most + 1}" in texts
    assert len(made) < 5, "the body, and not its items"


def test_ids_of_an_answer_are_not_looked_at_again() -> None:
    ids = [*range(10)]
    assert TokenizeResponse(count=10, max_model_len=100, tokens=ids).tokens is ids
    assert TokenizeResponse.model_json_schema()["properties"]["tokens"]["items"] == {"type": "integer"}


def test_ids_are_looked_at_in_slices_and_a_wrong_one_is_told_by_its_place() -> None:
    many = [*range(40_000)]
    assert DetokenizeRequest(tokens=many).tokens == many
    assert DetokenizeRequest.model_validate({"tokens": [*many, 8.0]}).tokens == [*many, 8]
    for wrong in (8.5, "8", True, None):
        with pytest.raises(pydantic.ValidationError) as refused:
            DetokenizeRequest.model_validate({"tokens": [*many, wrong, wrong]})
        [told] = refused.value.errors()
        assert told["loc"] == ("tokens", 40_000) and "valid integer" in told["msg"]
