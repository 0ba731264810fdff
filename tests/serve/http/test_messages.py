"""Anthropic's official client against `/v1/messages`: whole and streamed, tools and their loop, counts, errors."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from http_parts import Script, ToolTokenizer, browse, http_served
from serve_parts import WAIT_S, Served

KEY = "sk-anthropic"
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"type": "integer"}},
        "required": ["days"],
        "additionalProperties": False,
    },
}
HELLO: Any = [{"role": "user", "content": "hi "}]  # the template ends with a space, so "!" and so on follow
CALLS = (
    'Let me see. <tool_call>{"name": "get_weather", "arguments": {"days": 3}}</tool_call>'
    '<tool_call>{"name": "get_weather", "arguments": {"days": 4}}</tool_call>'
)
SCRIPT = Script()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    parts = Served(tokenizer=ToolTokenizer(), forced=SCRIPT, vocab_size=259, max_model_len=2048, num_pages=1024)
    with http_served(parts, api_keys_file=str(keys)):
        yield parts
    parts.scheduler.check()
    assert parts.scheduler.num_held_pages == 0


@pytest.fixture
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    SCRIPT.texts.clear()
    with anthropic.Anthropic(base_url=server.http_url, api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        yield client


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="fake", max_tokens=3, messages=HELLO)
    (block,) = message.content
    assert (block.type, block.text, message.stop_reason) == ("text", '!"#', "max_tokens")  # pyright: ignore
    assert (message.role, message.model, message.stop_sequence) == ("assistant", "fake", None)
    usage = message.usage
    count = client.messages.count_tokens(model="fake", messages=HELLO).input_tokens
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
    assert usage.output_tokens == 3
    assert message._request_id is not None


def test_a_stream_has_the_events_of_a_message(client: anthropic.Anthropic) -> None:
    SCRIPT.texts = [CALLS]
    kinds = []
    with client.messages.stream(model="fake", max_tokens=400, messages=HELLO, tools=[WEATHER]) as stream:
        for event in stream:
            kinds.append((event.type, getattr(event, "index", None)))
        streamed = stream.get_final_message()
    raw = [kind for kind in kinds if kind[0] not in ("text", "input_json")]  # these are added by the client
    collapsed = [kind for number, kind in enumerate(raw) if number == 0 or raw[number - 1] != kind]
    blocks = [(f"content_block_{name}", index) for index in range(3) for name in ("start", "delta", "stop")]
    assert collapsed == [("message_start", None), *blocks, ("message_delta", None), ("message_stop", None)]
    assert len(raw) > 30, "text and arguments come as they are written"
    SCRIPT.texts = [CALLS]
    whole = client.messages.create(model="fake", max_tokens=400, messages=HELLO, tools=[WEATHER])
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        text, *calls = message.content
        assert text.text == "Let me see."  # pyright: ignore
        assert [(c.name, c.input) for c in calls] == [("get_weather", {"days": 3}), ("get_weather", {"days": 4})]  # pyright: ignore
        assert len({c.id for c in calls}) == 2  # pyright: ignore
        assert message.usage.output_tokens == len(CALLS) + 1


def test_an_agents_loop(client: anthropic.Anthropic, server: Served) -> None:
    """As Claude Code does it: system blocks, tools, the answer sent back as it came, results of tools beside text."""
    SCRIPT.texts = [CALLS, "Sunny, then rain."]
    system: Any = [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be short."},
    ]
    options: Any = {
        "model": "fake",
        "max_tokens": 400,
        "system": system,
        "tools": [{**WEATHER, "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "me"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Weather?"}]}]
    with client.messages.stream(messages=messages, **options) as stream:
        answer = stream.get_final_message()
    messages.append({"role": "assistant", "content": answer.content})
    calls = [block for block in answer.content if block.type == "tool_use"]
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "rain"}],
            "is_error": False,
        },
        {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
    ]
    messages.append({"role": "user", "content": results})
    final = client.messages.create(messages=messages, **options)
    assert (final.stop_reason, final.content[0].text) == ("end_turn", "Sunny, then rain.")  # pyright: ignore
    function = {"name": "get_weather", "parameters": WEATHER["input_schema"], "description": WEATHER["description"]}
    shown = [{"type": "function", "function": function}]
    chat = [
        {"role": "system", "content": "You are an agent.\nBe short."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.input)}}
                for c in calls
            ],
        },
        {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"},
        {"role": "tool", "tool_call_id": calls[1].id, "content": "rain"},
        {"role": "user", "content": "Go on."},
    ]
    with browse(server, authorization=f"Bearer {KEY}") as http:
        tokens = http.post("/tokenize", json={"messages": chat, "tools": shown}).json()
    counted = client.messages.count_tokens(
        model="fake", messages=messages, system=system, tools=options["tools"], thinking=options["thinking"]
    )
    assert counted.input_tokens == tokens["count"], "the prompt is that of the same chat"
    usage = final.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert usage.cache_read_input_tokens, "the first turn of the loop is in the cache"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_demanded_call_is_constrained(client: anthropic.Anthropic, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    message = client.messages.create(model="fake", max_tokens=200, messages=HELLO, tools=[WEATHER], tool_choice=choice)
    (block,) = message.content
    assert message.stop_reason == "tool_use"
    assert set(block.input) == {"days"}  # pyright: ignore


def test_stop_sequences_and_formats(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="fake", max_tokens=9, messages=HELLO, stop_sequences=["#$"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ('!"', "stop_sequence", "#$")  # pyright: ignore
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    config: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "high"}
    message = client.messages.create(model="fake", max_tokens=100, messages=HELLO, output_config=config)
    assert set(json.loads(message.content[0].text)) == {"ok"}  # pyright: ignore
    extra = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}
    assert client.messages.create(model="fake", max_tokens=1, messages=HELLO, extra_body=extra).content


def test_a_call_that_is_cut_keeps_what_is_whole(client: anthropic.Anthropic) -> None:
    SCRIPT.texts = [CALLS]
    message = client.messages.create(model="fake", max_tokens=len(CALLS) - 13, messages=HELLO, tools=[WEATHER])
    assert [block.input for block in message.content[1:]] == [{"days": 3}, {"days": 4}]  # pyright: ignore
    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "assistant", "content": "The answer is"}]}, "cannot go on within a message"),
        ({"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "'poem'"),
        ({"messages": [{"role": "user", "content": []}]}, "has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "has a block of type 'tool_use'",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice has a name"),
        ({"use_beans": True}, "use_beans is not a field"),
    ],
)
def test_refusals_have_anthropics_shape(client: anthropic.Anthropic, fields: Any, text: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=text) as refused:
        client.messages.create(model="fake", max_tokens=5, messages=HELLO, extra_body=fields)
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_other_refusals(client: anthropic.Anthropic, server: Served) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(model="claude", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.AuthenticationError, match="needs a key"):
        client.with_options(api_key="wrong").messages.create(model="fake", max_tokens=5, messages=HELLO)
    bearer = anthropic.Anthropic(base_url=server.http_url, auth_token=KEY, max_retries=0)
    with bearer:
        assert bearer.messages.count_tokens(model="fake", messages=HELLO).input_tokens
    with browse(server, **{"x-api-key": KEY}) as http:
        assert http.get("/v1/models").status_code == 200
        lost = http.post("/v1/messages/lost", json={})
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
    assert lost.json()["type"] == "error"


def test_an_error_ends_a_stream(server: Served, client: anthropic.Anthropic) -> None:
    """The engine's shutdown within an answer, in the shape of this API. The last test: nothing is served after it."""
    server.runner.hold(after=8)
    stream = client.messages.create(model="fake", max_tokens=1000, messages=HELLO, stream=True)
    events = iter(stream)
    assert next(events).type == "message_start"
    server.request_shutdown()
    server.request_shutdown()
    server.runner.release()
    with pytest.raises(anthropic.APIStatusError) as failed:
        list(events)
    assert failed.value.body["error"]["type"] == "overloaded_error"  # pyright: ignore
