"""The official client against `/v1/responses`: events, tools, kept answers, refusals."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from http_parts import Script, ToolTokenizer, browse, http_served, openai_client
from serve_parts import Served

from jaxserve.serve.http.stored_responses import Stored, StoredResponses
from jaxserve.testing import ManualClock

KEYS = ("sk-one", "sk-two")
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer"}},
        "required": ["days"],
        "additionalProperties": False,
    },
}
TIME: Any = {"type": "function", "name": "get_time", "parameters": None, "strict": None}
CALL = 'Let me see. <tool_call>{"name": "get_weather", "arguments": {"days": 3}}</tool_call>'
SCRIPT = Script()


class Answer(pydantic.BaseModel):
    ok: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("\n".join(KEYS))
    parts = Served(tokenizer=ToolTokenizer(), forced=SCRIPT, vocab_size=259, max_model_len=4096, num_pages=2048)
    with http_served(parts, api_keys_file=str(keys)):
        yield parts
    parts.scheduler.check()
    assert parts.scheduler.num_held_pages == 0


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    SCRIPT.texts.clear()
    with openai_client(server, KEYS[0]) as client:
        yield client


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hi ", max_output_tokens=3, metadata={"a": "b"}, temperature=0)
    assert (answer.output_text, answer.status, answer.metadata) == ('!"#', "incomplete", {"a": "b"})
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3
    assert answer.usage.input_tokens + 3 == answer.usage.total_tokens
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()


def test_the_events_of_a_stream(client: openai.OpenAI) -> None:
    SCRIPT.texts = [CALL]
    events = list(client.responses.create(model="fake", input="hi ", tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds.count("response.output_text.delta") > 3
    assert kinds.count("response.function_call_arguments.delta") > 3
    final: Any = events[-1]
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in items] == [item.to_dict() for item in final.response.output]
    for event in events:
        if event.type == "response.output_text.done":
            assert event.text == "Let me see."
        if event.type == "response.function_call_arguments.done":
            assert json.loads(event.arguments) == {"days": 3}
    SCRIPT.texts = [CALL]
    whole = client.responses.create(model="fake", input="hi ", tools=[WEATHER])
    mine, theirs = whole.to_dict(), final.response.to_dict()
    assert plain(mine) == plain(theirs)


def plain(response: Any) -> Any:
    """Without what differs from call to call."""
    if isinstance(response, dict):
        left_out = ("id", "call_id", "created_at", "completed_at", "usage")
        return {name: plain(value) for name, value in response.items() if name not in left_out}
    return [plain(value) for value in response] if isinstance(response, list) else response


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    SCRIPT.texts = [CALL]
    with client.responses.stream(model="fake", input="hi ", tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_response()
    text, call = answer.output
    assert text.content[0].text == "Let me see."  # pyright: ignore
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"days": 3})  # pyright: ignore


def test_a_loop_without_store(client: openai.OpenAI) -> None:
    """As Codex does it: nothing is kept, the items of the answer are sent back as they came, streaming."""
    SCRIPT.texts = [CALL, "Sunny."]
    options: Any = {
        "model": "fake",
        "instructions": "You are an agent.",
        "tools": [WEATHER],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "abc",
    }
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: none."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    ]
    final: Any = None
    for turn in range(2):
        for event in client.responses.create(input=items, stream=True, **options):
            if event.type == "response.output_item.done":
                items.append(event.item.to_dict())
            final = event
        assert final.type == "response.completed"
        assert not final.response.store
        if turn == 0:
            call = items[-1]
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"})
    assert final.response.output_text == "Sunny."
    assert final.response.usage.input_tokens_details.cached_tokens > 0
    with pytest.raises(openai.NotFoundError, match="was not stored"):
        client.responses.retrieve(final.response.id)


def test_previous_response_id_is_the_whole_conversation(client: openai.OpenAI) -> None:
    SCRIPT.texts = [CALL, "Sunny.", "Sunny."]
    first = client.responses.create(model="fake", input="Weather?", instructions="Be kind.", tools=[WEATHER])
    call: Any = first.output[1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(
        model="fake", input=[result], previous_response_id=first.id, instructions="Be short.", tools=[WEATHER]
    )
    assert (second.output_text, second.previous_response_id) == ("Sunny.", first.id)
    all_items: Any = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output), result]
    whole = client.responses.create(model="fake", input=all_items, instructions="Be short.", tools=[WEATHER])
    assert second.usage is not None and whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    SCRIPT.texts = ["Yes."]
    third = client.responses.create(model="fake", input="Sure?", previous_response_id=second.id)
    assert third.output_text == "Yes.", "an answer keeps the conversation before it"


def test_answers_belong_to_a_key(client: openai.OpenAI, server: Served) -> None:
    answer = client.responses.create(model="fake", input="hi ", max_output_tokens=1)
    with openai_client(server, KEYS[1]) as other:
        for call in (
            lambda: other.responses.retrieve(answer.id),
            lambda: other.responses.delete(answer.id),
            lambda: other.responses.create(model="fake", input="a", previous_response_id=answer.id),
        ):
            with pytest.raises(openai.NotFoundError, match="belongs to another key"):
                call()
    with pytest.raises(openai.BadRequestError, match="is complete"):
        client.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError, match="stream is true"):
        client.responses.retrieve(answer.id, stream=True)


def test_the_methods_of_a_path_are_those_of_all_its_routes(server: Served) -> None:
    with browse(server, authorization=f"Bearer {KEYS[0]}") as http:
        refused = http.put("/v1/responses/resp_1")
    assert (refused.status_code, refused.headers["allow"]) == (405, "DELETE, GET")


def test_structured_output(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="fake", input="hi ", text_format=Answer, max_output_tokens=100)
    assert parsed.output_parsed is not None
    config: Any = {"format": {"type": "json_object"}}
    answer = client.responses.create(model="fake", input="hi ", text=config, max_output_tokens=100)
    assert isinstance(json.loads(answer.output_text), dict)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
)
def test_demanded_calls_are_constrained(client: openai.OpenAI, choice: Any) -> None:
    tools = [WEATHER] if choice == "required" else [TIME, WEATHER]
    answer = client.responses.create(
        model="fake", input="hi ", tools=tools, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200
    )
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "get_weather")  # pyright: ignore
    assert set(json.loads(call.arguments)) == {"days"}  # pyright: ignore


def test_a_tool_that_is_not_allowed_is_not_called(client: openai.OpenAI) -> None:
    SCRIPT.texts = [CALL]
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    answer = client.responses.create(model="fake", input="hi ", tools=[TIME, WEATHER], tool_choice=choice)
    assert [item.type for item in answer.output] == ["message"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"background": True}, "background: only"),
        ({"conversation": "conv_1"}, "conversation: only null"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"type": "poem", "text": "a"}]}, "'poem'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input has no message"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]}, "input_text"),
        ({"input": []}, "input has no message"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice names 'f'"),
        ({"use_beans": True}, "use_beans is not a field"),
    ],
)
def test_refusals(client: openai.OpenAI, fields: Any, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        client.responses.create(model="fake", input="a", extra_body=fields)


def test_a_server_that_keeps_nothing() -> None:
    parts = Served(tokenizer=ToolTokenizer(), vocab_size=259)
    with http_served(parts, stored_responses=0), openai_client(parts) as client:
        answer = client.responses.create(model="fake", input="hi ", max_output_tokens=2)
        assert (answer.output_text, answer.model_extra and answer.model_extra["store"]) == ('!"', False)
        with pytest.raises(openai.BadRequestError, match=r"serve\.http\.stored_responses is 0"):
            client.responses.create(model="fake", input="hi ", store=True)
        with pytest.raises(openai.NotFoundError, match="keeps no answers"):
            client.responses.create(model="fake", input="hi ", previous_response_id=answer.id)


# ---- the store -------------------------------------------------------------------------------------------------------


def entry(name: str, num_bytes: int = 10) -> Stored:
    return Stored(response_id=name, response=b"1" * (num_bytes - 2), messages=b"[]")


def test_the_store_is_bounded_in_number_bytes_and_time() -> None:
    clock = ManualClock()
    store = StoredResponses(3, 100, 60.0, clock)
    for name in "abc":
        store.put(b"me", entry(name))
    assert store.get(b"me", "a") is not None
    store.put(b"me", entry("d"))
    assert [name for name in "abcd" if store.get(b"me", name)] == ["a", "c", "d"], "the longest unused one goes"
    store.put(b"me", entry("large", 101))
    assert store.get(b"me", "large") is None
    assert store.get(b"you", "a") is None
    store.put(b"you", entry("e", 60))
    store.put(b"you", entry("f", 30))
    assert store.get(b"you", "f") is not None
    assert store.get(b"you", "e") is None, "the one with the most bytes makes room"
    assert (len(store), store.num_bytes) == (3, 50)
    clock.advance(59.0)
    assert store.get(b"me", "c") is not None
    clock.advance(2.0)
    assert (store.get(b"me", "d"), store.get(b"you", "f")) == (None, None)
    assert store.get(b"me", "c") is not None
    assert store.remove(b"me", "c")
    assert not store.remove(b"me", "c")
    assert (len(store), store.num_bytes) == (0, 0)
