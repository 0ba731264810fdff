"""The OpenAPI document against the live server: Schemathesis makes requests from it and judges the answers.

The engine is the fake one, so that what is tested is the door: no 5xx, no status and no body that the document does not
know, no refusal of OpenAI's error shape, nothing accepted that the document forbids.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
from http_parts import ToolTokenizer, browse, http_served
from serve_parts import Served

from jaxserve.api import sampling_ranges
from jaxserve.engine import Reranker
from jaxserve.serve.http.messages_bodies import MessagesRequest
from jaxserve.serve.http.requests import Body, ChatRequest
from jaxserve.serve.http.responses_api_bodies import ResponsesRequest

KEY = "sk-schemathesis"
NUM_OPERATIONS = 27  # that are tested
# What is right by the document may still be too long, or an id outside of the vocabulary: a 400 for it is no fault.
# Hence no `positive_data_acceptance`.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    # Short contexts: `max_tokens` null means all that fits, and `n` may be a thousand.
    judges = Reranker(template="{instruction}{query} {document}", instruction="", yes_id=ord("y"), no_id=ord("n"))
    parts = Served(
        tokenizer=ToolTokenizer(), vocab_size=259, max_model_len=64, num_pages=512, max_rows=16, reranker=judges
    )
    with http_served(parts, api_keys_file=str(keys), max_body_bytes=200_000) as served:
        yield served


def run_schemathesis(server: Served, folder: Path, phases: str, num_examples: int, timeout_s: float) -> None:
    """Fails with its report when a check did."""
    command = [sys.executable, "-c", "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"]
    command += ["run", f"{server.http_url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"]
    command += ["--checks", ",".join(CHECKS), "--phases", phases]
    command += ["--max-examples", str(num_examples), "--generation-deterministic", "--no-color", "--workers", "1"]
    command += ["--suppress-health-check", "all", "--request-timeout", "120", "--warnings", "off"]
    command += ["--exclude-path", "/events"]  # a stream that never ends
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert re.search(rf"Tested: {NUM_OPERATIONS}\b", done.stdout), done.stdout


def check_unharmed(server: Served) -> None:
    with browse(server, authorization=f"Bearer {KEY}") as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).json()
        assert answer["choices"][0]["text"] == "bcd"
    server.scheduler.check()


@pytest.mark.slow
def test_a_few_requests_for_each_operation(server: Served, tmp_path: Path) -> None:
    run_schemathesis(server, tmp_path, "fuzzing", 10, 1200)
    check_unharmed(server)


@pytest.mark.slow
def test_two_hundred_requests_for_each_operation(server: Served, tmp_path: Path) -> None:
    run_schemathesis(server, tmp_path, "coverage,fuzzing", 200, 3600)
    check_unharmed(server)


def test_the_document_names_every_route(server: Served) -> None:
    with browse(server, authorization=f"Bearer {KEY}") as client:
        paths = client.get("/openapi.json").json()["paths"]
    assert sum(len(paths[path]) for path in paths if path != "/events") == NUM_OPERATIONS
    wanted = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/v1/embeddings"}
    wanted |= {"/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"}
    wanted |= {"/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"}
    wanted |= {"/v1/messages", "/v1/messages/count_tokens"}
    wanted |= {
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/ping",
        "/health",
        "/live",
        "/ready",
        "/version",
        "/load",
        "/metrics",
    }
    assert wanted <= set(paths)


# For each body a request that is right, to which one field is added.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "CompletionRequest": ("/v1/completions", {"prompt": "a", "max_tokens": 2, "echo": True}),
    "ChatRequest": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}),
    "ResponsesRequest": ("/v1/responses", {"input": "a"}),
    "MessagesRequest": (
        "/v1/messages",
        {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    ),
    "EmbeddingRequest": ("/v1/embeddings", {"input": "a"}),
    "RerankRequest": ("/rerank", {"query": "a", "documents": ["b"]}),
}
# Numbers whose range the model's files say, or that are right only together with another field.
ELSEWHERE = {"max_tool_calls", "best_of"}


def test_the_ranges_of_the_document_are_those_of_the_server(server: Served) -> None:
    """Below the least and above the most value a request is refused by the name of the field; with them it is not."""
    tested: set[str] = set()
    with browse(server, authorization=f"Bearer {KEY}") as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        for body, (path, request) in BODIES.items():
            for name, field in schemas[body]["properties"].items():
                kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") in ("integer", "number")]
                if not kinds or name in ELSEWHERE:
                    continue
                (kind,) = kinds
                least = kind["minimum"] if "minimum" in kind else kind["exclusiveMinimum"] + 1
                most = kind.get("maximum")
                tested.add(name)
                for value in (least - 1, *(() if most is None else (most + max(1, most),))):
                    answer = client.post(path, json={**request, name: value})
                    assert answer.status_code == 400 and name in answer.json()["error"]["message"], (body, name, value)
                for value in (least, *(() if most is None else (most,))):
                    error = client.post(path, json={**request, name: value}).json().get("error")
                    assert error is None or not re.match(rf"{name} is \S+, but must", error["message"]), (name, error)
    assert set(sampling_ranges()) - tested == set(), "a range that no field has"


RESULT = {"type": "tool_result", "tool_use_id": "a"}
MESSAGE = {"role": "user", "content": "a"}
TYPES = ("function", "namespace", "allowed_tools", "custom", "message", "function_call", "function_call_output", "text")
TYPES += ("reasoning", "web_search", "web_search_call", "item_reference", "image", "document", "search_result")
TYPES += ("tool_reference", "tool_use", "tool_result", "thinking", "tool_addition", "browser_state", "compaction")
FIELDS = ({}, {"name": "a"}, {"name": 1, "function": {"name": "a"}, "input_schema": {}, "tools": []})


def said(block: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [block]}


# Where an object stands whose `type` says what it is, and any of several types of others is left out.
OBJECTS: dict[str, tuple[type[Body], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "tools of a chat": (ChatRequest, lambda it: {"messages": [MESSAGE], "tools": [it]}),
    "input of responses": (ResponsesRequest, lambda it: {"input": [it]}),
    "tools of responses": (ResponsesRequest, lambda it: {"input": "a", "tools": [it]}),
    "tools of a namespace": (
        ResponsesRequest,
        lambda it: {"input": "a", "tools": [{"type": "namespace", "name": "a", "tools": [it]}]},
    ),
    "a choice of responses": (ResponsesRequest, lambda it: {"input": "a", "tool_choice": it}),
    "allowed tools": (
        ResponsesRequest,
        lambda it: {"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [it]}},
    ),
    "blocks": (MessagesRequest, lambda it: {"messages": [said(it)]}),
    "results": (
        MessagesRequest,
        lambda it: {"messages": [said({**RESULT, "content": [it]})]},
    ),
    "tools of messages": (MessagesRequest, lambda it: {"messages": [MESSAGE], "tools": [it]}),
    "a tool that comes": (
        MessagesRequest,
        lambda it: {
            "messages": [
                {"role": "user", "content": [{"type": "tool_addition", "tool": {"type": "a", "definition": it}}]}
            ]
        },
    ),
}


@pytest.mark.parametrize("place", OBJECTS)
def test_the_document_lists_each_type_that_is_accepted(server: Served, place: str) -> None:
    body, request_with = OBJECTS[place]
    with browse(server, authorization=f"Bearer {KEY}") as client:
        schemas = client.get("/openapi.json").json()["components"]
    document = jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{body.__name__}", "components": schemas})
    accepted = set()
    for kind in (*TYPES, "a type of tomorrow", None, 1):
        for fields in FIELDS:
            request = request_with({"type": kind, **fields})
            if body is MessagesRequest:
                request |= {"model": "fake", "max_tokens": 2}
            try:
                body.model_validate(request)
            except pydantic.ValidationError:
                continue
            accepted.add(kind)
            assert document.is_valid(request), request
    assert accepted - {"function"}
