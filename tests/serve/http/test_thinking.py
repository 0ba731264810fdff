"""Thoughts of a model through every API: apart from the answer, streamed and whole, counted, and shown to it again."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from http_parts import Script, ToolTokenizer, browse, http_served, openai_client
from serve_parts import WAIT_S, Served

THOUGHT = "I look it up."
CALL = '<tool_call>{"name": "get_weather", "arguments": {"days": 3}}</tool_call>'
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nLet me see. {CALL}"
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
SCRIPT = Script()


class ThinkingTokenizer(ToolTokenizer):
    """Its template shows earlier thoughts, and opens a thought when it is told to."""

    chat_template = (
        str(ToolTokenizer.chat_template).replace(
            "{{ m['content'] }}",
            "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}",
        )
        + "{% if enable_thinking %}<think>\n{% endif %}"
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    parts = Served(tokenizer=ThinkingTokenizer(), forced=SCRIPT, vocab_size=259, max_model_len=2048, num_pages=1024)
    with http_served(parts):
        yield parts


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    SCRIPT.texts = []
    with openai_client(server) as client:
        yield client


def test_chats(client: openai.OpenAI, server: Served) -> None:
    SCRIPT.texts = [ANSWER] * 3
    create: Any = client.chat.completions.create
    options = {"model": "fake", "messages": MESSAGES, "tools": [TOOL], "max_tokens": 300}
    whole = create(**options)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, "Let me see.")
    assert message.tool_calls[0].function.arguments == '{"days": 3}'
    thought_tokens = whole.usage.completion_tokens_details.reasoning_tokens
    assert len(THOUGHT) < thought_tokens < len(ANSWER) - len(CALL)
    deltas = [chunk.choices[0].delta for chunk in create(**options, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    hidden = create(**options, extra_body={"include_reasoning": False})
    assert "reasoning_content" not in hidden.choices[0].message.model_extra
    assert hidden.usage.completion_tokens_details.reasoning_tokens == thought_tokens
    with browse(server) as http:
        turns = [*MESSAGES, message.model_dump(), {"role": "tool", "content": "sunny", "tool_call_id": "1"}]
        shown = http.post("/tokenize", json={"messages": turns, "return_token_strs": True}).json()["token_strs"]
    assert f"<think>{THOUGHT}</think>" in "".join(shown)


def test_a_thought_that_the_prompt_opens(client: openai.OpenAI) -> None:
    SCRIPT.texts = [f"{THOUGHT}\n</think>\n\nSunny."]
    create: Any = client.chat.completions.create
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    message = create(model="fake", messages=MESSAGES, max_tokens=100, extra_body=extra).choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, "Sunny.")


FORM: Any = {"type": "json_schema", "json_schema": {"name": "days", "schema": SCHEMA}}


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": FORM},
        {"extra_body": {"structured_outputs": {"choice": ['"a"', "{b}"]}}},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"tools": [TOOL], "response_format": FORM},
    ],
)
def test_a_constraint_begins_behind_the_thought(client: openai.OpenAI, options: Any, begun: bool) -> None:
    """The fake model writes a thought and would end; the grammar wants more."""
    SCRIPT.texts = [f"{THOUGHT}\n</think>\n" if begun else f"<think>\n{THOUGHT}\n</think>\n"]
    extra = {"chat_template_kwargs": {"enable_thinking": begun}, **options.get("extra_body", {})}
    create: Any = client.chat.completions.create
    choice = create(model="fake", messages=MESSAGES, max_tokens=300, **{**options, "extra_body": extra}).choices[0]
    assert choice.message.reasoning_content == THOUGHT
    if choice.message.tool_calls:
        arguments = json.loads(choice.message.tool_calls[0].function.arguments)
        assert "tool_choice" not in options or arguments.keys() == {"days"}
        assert choice.finish_reason == "tool_calls"
    else:
        assert "tool_choice" not in options
        assert choice.finish_reason == "stop"
        assert choice.message.content in ('"a"', "{b}") or isinstance(json.loads(choice.message.content), dict)


def test_expressions_and_grammars_of_clients_leave_no_room_for_thoughts(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    extra = {"structured_outputs": {"regex": "[ab]c"}, "chat_template_kwargs": {"enable_thinking": True}}
    choice = create(model="fake", messages=MESSAGES, max_tokens=100, extra_body=extra).choices[0]
    assert choice.message.content in ("ac", "bc")


def test_messages_have_thinking_blocks(server: Served) -> None:
    SCRIPT.texts = [ANSWER, ANSWER, f"{THOUGHT}</think>Sunny."]
    tools: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
    with anthropic.Anthropic(base_url=server.http_url, api_key="none", max_retries=0, timeout=WAIT_S) as client:
        whole = client.messages.create(model="fake", max_tokens=300, messages=MESSAGES, tools=tools)
        with client.messages.stream(model="fake", max_tokens=300, messages=MESSAGES, tools=tools) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            thinking, text, call = message.content
            assert (thinking.thinking, text.text, call.input) == (THOUGHT, "Let me see.", {"days": 3})  # pyright: ignore
        result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "sunny"}  # pyright: ignore
        turns: Any = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        final = client.messages.create(
            model="fake", max_tokens=300, messages=turns, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    assert [block.type for block in final.content] == ["thinking", "text"]


def test_responses_have_reasoning_items(client: openai.OpenAI) -> None:
    SCRIPT.texts = [ANSWER, "Sunny."]
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": None}
    events = list(client.responses.create(model="fake", input="Weather?", tools=[tool], stream=True))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[3:8] == [
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    final: Any = events[-1]
    thought, text, call = final.response.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", THOUGHT, [])
    assert (text.content[0].text, call.arguments) == ("Let me see.", '{"days": 3}')
    assert final.response.usage.output_tokens_details.reasoning_tokens > len(THOUGHT)
    items: Any = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in final.response.output)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    assert client.responses.create(model="fake", input=items, tools=[tool]).output_text == "Sunny."


@pytest.mark.parametrize("text", [CALL, "\n" + CALL + CALL, '{"days": 5}', "Ok. " + CALL])
def test_an_answer_is_a_call_or_fits_its_format(client: openai.OpenAI, text: str) -> None:
    """Tools beside a response_format: the grammar leaves no third."""
    SCRIPT.texts = [text]
    create: Any = client.chat.completions.create
    choice = create(model="fake", messages=MESSAGES, tools=[TOOL], response_format=FORM, max_tokens=200).choices[0]
    if choice.message.tool_calls:
        assert choice.message.content is None
        assert len(choice.message.tool_calls) == text.count("days")
        assert choice.finish_reason == "tool_calls"
    else:
        assert json.loads(choice.message.content).keys() == {"days"}
    assert bool(choice.message.tool_calls) is text.lstrip().startswith("<")


@pytest.mark.parametrize("strict", [True, False])
def test_strict_functions_are_called_by_their_schema(client: openai.OpenAI, strict: bool) -> None:
    """With `auto`: the fake model would write a text where a number has to be."""
    wrong = f'{THOUGHT}</think>Ok. <tool_call>{{"name": "get_weather", "arguments": {{"days": "many"}}}}</tool_call>'
    SCRIPT.texts = [wrong]
    tool = {"type": "function", "function": {**TOOL["function"], "strict": strict}}
    create: Any = client.chat.completions.create
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    message = create(model="fake", messages=MESSAGES, tools=[tool], max_tokens=200, extra_body=extra).choices[0].message
    assert message.reasoning_content == THOUGHT
    assert message.content.startswith("Ok.")
    arguments = message.tool_calls[0].function.arguments
    assert ('"many"' in arguments) is not strict
