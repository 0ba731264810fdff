"""Every field that the official client can send or dump is decided about: used, taken where it changes nothing, or
refused by name. A newer client with a new field fails here."""

import json
from typing import Any

import httpx
import pydantic
import pytest
from http_parts import ToolTokenizer, browse, http_served
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from serve_parts import Served, note_prepared

from jaxserve.serve.http import requests
from jaxserve.serve.http.conversation import template_variables
from jaxserve.text import ChatTemplate

TAKEN: dict[type[pydantic.BaseModel], dict[str, list[Any]]] = {
    requests.ChatRequest: {
        "metadata": [{"a": "b"}],
        "prompt_cache_key": ["k"],
        "prompt_cache_options": [{"mode": "implicit"}],
        "prompt_cache_retention": ["24h"],
        "prediction": [{"type": "content", "content": "x"}],
        "safety_identifier": ["k"],
        "service_tier": ["auto", "default", "flex"],
        "store": [False, True],
        "client_metadata": [{"a": "b"}],
        "cache_prompt": [True],
        "best_of": [1],
        "modalities": [["text"]],
        "functions": [[]],
        "function_call": ["none", "auto"],
        "reasoning_effort": ["none", "medium", "high"],
        "verbosity": ["medium", "low"],
        "add_special_tokens": [False],
        "chat_template": [],
        "continue_final_message": [False],
        "documents": [[]],
        "echo": [False],
        "include_reasoning": [True],
        "length_penalty": [1, 1.0],
        "mm_processor_kwargs": [{}],
        "spaces_between_special_tokens": [True, False],
        "use_beam_search": [False],
        "stream_options": [{"include_obfuscation": True}, {"include_usage": None}],
        "tools": [[]],
        "tool_choice": ["none", "auto"],
        "parallel_tool_calls": [True, False],
    },
    requests.CompletionRequest: {"best_of": [1], "suffix": [""], "metadata": [{"a": "b"}], "logit_bias": [{}]},
    requests.EmbeddingRequest: {
        "user": ["u"],
        "metadata": [{"a": "b"}],
        "safety_identifier": ["k"],
        "service_tier": ["auto"],
        "add_special_tokens": [True],
        "priority": [0],
        "normalize": [True],
        "embed_dtype": ["float32"],
        "endianness": ["native", "little"],
    },
}
REFUSED = {
    requests.ChatRequest: {
        "audio": {"format": "wav"},
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "modalities": ["text", "audio"],
        "moderation": {"model": "m"},
        "best_of": 2,
        "web_search_options": {},
        "chat_template": "x",
        "continue_final_message": True,
        "echo": True,
        "logits_processors": ["x"],
        "length_penalty": True,
        "use_beam_search": 0,
    },
    requests.CompletionRequest: {"best_of": 2, "suffix": "x", "use_beam_search": True, "thinking_token_budget": 5},
    requests.EmbeddingRequest: {
        "add_special_tokens": False,
        "priority": 1,
        "dimensions": 2,
        "embed_dtype": "float16",
    },
}
MINIMAL: dict[Any, Any] = {
    requests.ChatRequest: {"messages": [{"role": "user", "content": "hi "}]},
    requests.CompletionRequest: {"prompt": "a"},
    requests.EmbeddingRequest: {"input": "a"},
}
PATHS = {
    requests.ChatRequest: "/v1/chat/completions",
    requests.CompletionRequest: "/v1/completions",
    requests.EmbeddingRequest: "/v1/embeddings",
}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat_create_params.CompletionCreateParamsNonStreaming, requests.ChatRequest),
        (completion_create_params.CompletionCreateParamsNonStreaming, requests.CompletionRequest),
        (embedding_create_params.EmbeddingCreateParams, requests.EmbeddingRequest),
    ],
)
def test_every_field_of_the_official_client_may_be_null(theirs: Any, ours: type[requests.Body]) -> None:
    names = set(theirs.__annotations__)
    assert len(names) >= 5
    assert names <= set(ours.model_fields) | ours.marks, "a field of the client that nothing is decided about"
    minimal = MINIMAL[ours]
    body = ours.model_validate({**dict.fromkeys(ours.model_fields), **minimal})
    assert body == ours.model_validate(minimal), "null is absent"


@pytest.fixture(scope="module")
def client() -> Any:
    with http_served(Served(tokenizer=ToolTokenizer(), vocab_size=259)) as parts, browse(parts) as client:
        yield client


def post(client: httpx.Client, ours: type[pydantic.BaseModel], **fields: Any) -> httpx.Response:
    length = {} if ours is requests.EmbeddingRequest else {"max_tokens": 1}
    return client.post(PATHS[ours], json={**MINIMAL[ours], **length, **fields})


def said(response: httpx.Response) -> Any:
    """What an answer says, without its name and date."""
    body = response.json()
    return body["data"] if "data" in body else body["choices"]


def test_neutral_values_change_nothing(client: httpx.Client) -> None:
    for ours, values in TAKEN.items():
        plain = said(post(client, ours))
        nulls = dict.fromkeys(set(ours.model_fields) - {"max_tokens", *MINIMAL[ours]})
        assert said(post(client, ours, **nulls)) == plain
        for name, taken in values.items():
            for value in taken:
                beside = {"stream": True} if name == "stream_options" else {}
                response = post(client, ours, **{name: value}, **beside)
                assert response.status_code == 200, (name, value, response.text)
                assert beside or said(response) == plain, name


def test_what_would_change_the_answer_is_refused_by_name(client: httpx.Client) -> None:
    for ours, values in REFUSED.items():
        for name, value in values.items():
            response = post(client, ours, **{name: value})
            assert response.status_code == 400, name
            assert response.json()["error"]["message"].startswith(name), response.text
    text = post(client, requests.ChatRequest, function_call="x").json()["error"]["message"]
    assert text == 'function_call: only null or "none" or "auto" works here; here it is \'tool_choice\''


def test_null_is_absent_under_unknown_names_too(client: httpx.Client) -> None:
    """A newer client dumps fields that this server has never heard of."""
    for ours, path in PATHS.items():
        assert said(post(client, ours, newest=None, **{"another one": None})) == said(post(client, ours))
        response = post(client, ours, newest=None, newer=0)
        assert response.status_code == 400, path
        message = response.json()["error"]["message"]
        assert message.startswith("newer is not a field that this server knows")
    messages = [{"role": "user", "content": "hi ", "newest": None}]
    assert said(post(client, requests.ChatRequest, messages=messages)) == said(post(client, requests.ChatRequest))
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": None, "newest": None}}
    assert "schema" in post(client, requests.ChatRequest, response_format=named).json()["error"]["message"]


def test_best_of_as_many_as_are_sent_back(client: httpx.Client) -> None:
    assert post(client, requests.CompletionRequest, best_of=2, n=2).status_code == 200
    assert "best_of is 1 and n 2" in post(client, requests.CompletionRequest, best_of=1, n=2).text


@pytest.mark.parametrize(
    ("template", "prompts"),
    [
        ("{{ reasoning_effort }}", {"high": "high", "none": "none", "xhigh": "xhigh"}),
        ("{{ enable_thinking is not defined or enable_thinking }}", {"high": "True", "none": "False"}),
        ("{{ thinking | default(true) }}", {"low": "True", "none": "False"}),
        ("{{ enable_thinking }}{{ reasoning_effort }}", {"none": "Falsenone", "max": "max"}),
        ("x", {"none": "x", "minimal": "x"}),
    ],
)
def test_reasoning_effort_is_a_hint(template: str, prompts: dict[str, str]) -> None:
    chat = ChatTemplate(template)
    plain = requests.ChatRequest(messages=[requests.Message(role="user", content="a")])
    for effort, prompt in prompts.items():
        body = plain.model_copy(update={"reasoning_effort": effort})
        variables = template_variables(body, chat)
        assert chat.render([{"role": "user", "content": "a"}], variables=variables) == prompt
    given = {"enable_thinking": True, "reasoning_effort": "mine"}
    body = plain.model_copy(update={"reasoning_effort": "none", "chat_template_kwargs": given})
    assert template_variables(body, chat).items() >= given.items(), "what is asked for by its own name counts"


def test_a_template_sees_what_the_model_said_and_no_more(client: httpx.Client) -> None:
    """Whatever clients attach to a message; and null or no calls are as no word of calls."""

    class Telling(ToolTokenizer):
        chat_template = "{{ messages | tojson }}"

    call = {
        "index": 0,
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": "{", "parsed_arguments": {}},
    }
    extras = {"annotations": [], "audio": None, "function_call": None, "refusal": None, "parsed": {"x": 1}}
    said = {"role": "assistant", "content": "a", **extras}
    messages = [{**said, "tool_calls": None}, {**said, "tool_calls": []}, {**said, "tool_calls": [call]}]
    with http_served(Served(tokenizer=Telling(), vocab_size=259)) as parts, browse(parts) as telling:
        answer = post(telling, requests.ChatRequest, messages=messages, return_token_ids=True).json()
    plain = {"role": "assistant", "content": "a"}
    shown = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    assert json.loads(bytes(answer["prompt_token_ids"])) == [plain, plain, {**plain, "tool_calls": [shown]}]


def test_tenant_and_targets_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"ttft_target_s": 0.5, "tpot_target_s": 2}
    with http_served(Served(tokenizer=ToolTokenizer(), vocab_size=259)) as parts, browse(parts) as client:
        prepared = note_prepared(parts, monkeypatch)
        for ours in (requests.ChatRequest, requests.CompletionRequest):
            assert post(client, ours, user="t", **targets).status_code == 200
            assert post(client, ours).status_code == 200
            refused = post(client, ours, ttft_target_s=0)
            assert refused.status_code == 400
            assert "ttft_target_s" in refused.json()["error"]["message"]
    found = [(r.tenant, r.ttft_target_s, r.tpot_target_s) for r in prepared]
    assert found == [("t", 0.5, 2), ("", None, None)] * 2
