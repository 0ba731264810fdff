"""The official client drives every route it knows, blocking and asyncio, streaming and not."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from http_parts import ToolTokenizer, http_served, openai_client, say
from serve_parts import WAIT_S, Served

MESSAGES: Any = [{"role": "user", "content": "hi "}]  # the template ends with a space, so "!" and so on follow
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer"}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
}


class Answer(pydantic.BaseModel):
    ok: bool


CALL = 'One moment. <tool_call>\n{"name": "get_weather", "arguments": {"days": 3}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>{"name": "get_weather", "arguments": {"days": 4}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    forced = {**say("calls-1", CALL), **say("calls-2", TWO_CALLS), **say("text", "no call"), **say("umlaut", "é日!")}
    parts = Served(tokenizer=ToolTokenizer(), forced=forced, vocab_size=259)
    with http_served(parts):
        yield parts
    parts.scheduler.check()
    assert parts.scheduler.num_held_pages == 0


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


# ---- models ----------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "fake"
    assert client.models.retrieve("fake").owned_by == "jaxserve"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.models.retrieve("gpt-4")


# ---- completions -----------------------------------------------------------------------------------------------------


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="a", max_tokens=5)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("bcdef", "length")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 5, 7)
    assert answer._request_id == answer.id.removeprefix("cmpl-")


def test_several_prompts_and_sequences(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "k"], max_tokens=3, n=2, echo=True)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "abcd"), (1, "abcd"), (2, "klmn"), (3, "klmn")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)
    ids = client.completions.create(model="fake", prompt=[[97], [98, 99]], max_tokens=1)
    assert [c.text for c in ids.choices] == ["b", "d"]
    assert client.completions.create(model="fake", prompt=[97, 98], max_tokens=1).choices[0].text == "c"


def test_completion_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="fake", prompt="a", max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["b", "c", "d", "e"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


def test_completion_stream_of_several(client: openai.OpenAI) -> None:
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(model="fake", prompt=["a", "k"], max_tokens=3, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "bcd", 1: "bcd", 2: "lmn", 3: "lmn"}


def test_completion_logprobs_with_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=2, logprobs=2, echo=True, n=2)
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["<s>", "a", "b", "c", "d"]
        assert logprobs.text_offset == [0, 0, 1, 2, 3]
        assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[0] is None
        assert [len(top) for top in logprobs.top_logprobs[1:]] == [2, 2, 2, 2]


def test_logprobs_of_an_echoed_prompt_without_alternatives(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=2, logprobs=0, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["<s>", "a", "b", "c", "d"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]


def test_logprobs_beyond_ascii(client: openai.OpenAI) -> None:
    """Byte tokens keep names of their own, and offsets count the characters of the text that is sent back."""
    prompt = "é日!"
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2, logprobs=5, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text == prompt + '"#'
    parts = [rf"bytes:\x{byte:02x}" for byte in "é日".encode()]
    assert logprobs.tokens == ["<s>", *parts, "!", '"', "#"]
    assert logprobs.text_offset == [0, 0, 0, 1, 1, 1, 2, 3, 4]
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens is not None
    for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True):
        assert top is not None
        assert len(top) == 5
        assert token in top
    ids = client.completions.create(
        model="fake", prompt=prompt, max_tokens=2, logprobs=5, extra_body={"return_tokens_as_token_ids": True}
    )
    named = ids.choices[0].logprobs
    assert named is not None
    assert named.tokens == ["token_id:34", "token_id:35"]
    assert named.top_logprobs is not None
    assert all(len(top) == 5 and key.startswith("token_id:") for top in named.top_logprobs for key in top)


def test_bytes_of_chat_logprobs_make_characters(client: openai.OpenAI) -> None:
    extra: Any = {"request_id": "umlaut"}
    create: Any = client.chat.completions.create
    answer = create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=3, extra_body=extra)
    entries = answer.choices[0].logprobs.content
    assert bytes(b for e in entries[:-1] for b in e.bytes).decode() == answer.choices[0].message.content == "é日!"
    assert all(len(t.bytes) == 1 for e in entries[:-1] for t in e.top_logprobs)
    extra["return_tokens_as_token_ids"] = True
    named = create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=1, extra_body=extra)
    first = named.choices[0].logprobs.content[0]
    assert (first.token, first.bytes) == ("token_id:195", [195])
    assert first.top_logprobs[0].token.startswith("token_id:")


def test_scoring_a_prompt_generates_nothing(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=0, logprobs=1, echo=True)
    (choice,) = answer.choices
    assert choice.text == "ab"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<s>", "a", "b"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
        client.completions.create(model="fake", prompt="ab", max_tokens=0)


def test_stop_seed_bias_and_vllm_fields(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake",
        prompt="a",
        max_tokens=9,
        stop=["ef"],
        seed=5,
        temperature=0,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"98": 1},
        user="me",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "bad_words": ["zz"],
            "min_tokens": 1,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "prompt_logprobs": 1,
        },
    )
    choice: Any = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("bcdef", "stop", "ef")
    assert choice.token_ids == [98, 99, 100, 101, 102]
    assert choice.prompt_token_ids == [256, 97]
    assert choice.prompt_logprobs[0] is None
    assert choice.prompt_logprobs[1]["97"]["decoded_token"] == "a"
    stopped = client.completions.create(model="fake", prompt="a", max_tokens=9, extra_body={"stop_token_ids": [100]})
    assert stopped.choices[0].text == "bc"


# ---- chats -----------------------------------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=3)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", '!"#', "length")
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=3, n=2, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    for index in (0, 1):
        deltas = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert deltas[0].delta.role == "assistant"
        assert "".join(d.delta.content or "" for d in deltas) == '!"#'
        assert [d.finish_reason for d in deltas] == [None, None, None, "length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_a_chat_stream_begins_with_what_was_asked_about_the_prompt(client: openai.OpenAI) -> None:
    options: Any = {"max_tokens": 2, "extra_body": {"return_token_ids": True, "prompt_logprobs": 1}}
    whole: Any = client.chat.completions.create(model="fake", messages=MESSAGES, **options)
    assert len(whole.prompt_token_ids) == len(whole.prompt_logprobs) == whole.usage.prompt_tokens
    chunks: Any = list(client.chat.completions.create(model="fake", messages=MESSAGES, n=2, stream=True, **options))
    told = [{k: v for k, v in c.model_dump(exclude_unset=True).items() if k.startswith("prompt_")} for c in chunks]
    assert told[0] == {"prompt_token_ids": whole.prompt_token_ids, "prompt_logprobs": whole.prompt_logprobs}
    assert not any(told[1:])


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(e.token, e.logprob, e.bytes) for e in logprobs.content] == [("!", -0.5, [33]), ('"', -0.5, [34])]
    assert [[t.token for t in e.top_logprobs] for e in logprobs.content] == [["!", '"'], ['"', "#"]]
    streamed = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2, stream=True
    )
    entries = [e for c in streamed if (found := c.choices[0].logprobs) is not None for e in found.content or ()]
    assert entries == logprobs.content


def test_parts_and_turns_become_the_prompt(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    answer = client.chat.completions.create(
        model="fake", messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
    )
    prompt: Any = answer
    text = ToolTokenizer().decode(prompt.prompt_token_ids)
    assert text == 'system: s\nuser: one\ntwo\nassistant: \nf({"x": 1})tool: 5\nassistant: '


def test_messages_come_back_as_the_client_dumps_them(client: openai.OpenAI) -> None:
    messages = [*MESSAGES]
    for _ in range(2):
        answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=2)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more "}]
    parsed = client.chat.completions.parse(model="fake", messages=messages, max_tokens=100, response_format=Answer)
    assert parsed.choices[0].message.parsed is not None
    messages += [parsed.choices[0].message.model_dump(warnings=False), *MESSAGES]
    answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    assert answer.choices[0].message.content == "!"


def test_called_and_cut_tools_come_back(client: openai.OpenAI) -> None:
    """An agent's loop. What was cut within its arguments is no JSON, and the template is shown the text."""
    for most, arguments in ((200, '{"days": 3}'), (66, '{"day')):
        extra = {"request_id": "calls-1"}
        options: Any = {"tools": [WEATHER], "max_tokens": most, "extra_body": extra}
        whole = client.chat.completions.create(model="fake", messages=MESSAGES, **options).choices[0].message
        with client.chat.completions.stream(model="fake", messages=MESSAGES, **options) as stream:
            for _ in stream:
                pass
            streamed = stream.current_completion_snapshot.choices[0].message
        for message in (whole, streamed):
            assert message.tool_calls is not None
            call: Any = message.tool_calls[0]
            assert call.function.arguments == arguments
            result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            messages: Any = [*MESSAGES, message.model_dump(), result]
            answer: Any = client.chat.completions.create(
                model="fake", messages=messages, tools=[WEATHER], max_tokens=1, extra_body={"return_token_ids": True}
            )
            shown = json.dumps(json.loads(arguments) if most == 200 else arguments)
            assert f"get_weather({shown})" in ToolTokenizer().decode(answer.prompt_token_ids)


# ---- constrained output ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client: openai.OpenAI, stream: bool) -> None:
    create: Any = client.chat.completions.create
    answer = create(model="fake", messages=MESSAGES, max_tokens=100, response_format=SCHEMA, stream=stream)
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    assert set(json.loads(text)) == {"ok"}


def test_json_object_and_vllm_constraints(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    answer = create(model="fake", messages=MESSAGES, max_tokens=100, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    for constraint, wanted in (
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]c"}, {"ac", "bc"}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
    ):
        answer = create(model="fake", messages=MESSAGES, max_tokens=9, extra_body={"structured_outputs": constraint})
        assert answer.choices[0].message.content in wanted
    with pytest.raises(openai.BadRequestError):
        create(model="fake", messages=MESSAGES, extra_body={"structured_outputs": {"regex": "("}})


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_the_model_chooses_to_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=[WEATHER], max_tokens=200, extra_body={"request_id": "calls-1"}
    )
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"days": 3})


def test_tool_calls_are_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", messages=MESSAGES, tools=[WEATHER], max_tokens=200, extra_body={"request_id": "calls-2"}
    ) as stream:
        deltas = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    assert message.content == "One moment."
    assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [{"days": 3}, {"days": 4}]
    assert len(deltas) > 10, "arguments come in pieces, as they are written"


def test_one_call_at_most(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    answer = create(
        model="fake",
        messages=MESSAGES,
        tools=[WEATHER],
        max_tokens=200,
        parallel_tool_calls=False,
        extra_body={"request_id": "calls-2"},
    )
    assert len(answer.choices[0].message.tool_calls) == 1


def test_the_model_chooses_not_to_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=[WEATHER], max_tokens=200, extra_body={"request_id": "text"}
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("no call", "stop")


def test_none_shows_the_model_no_tools(client: openai.OpenAI) -> None:
    shown, hidden = (
        client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=[WEATHER], tool_choice=choice, max_tokens=1
        ).usage
        for choice in ("auto", "none")
    )
    plain = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=1).usage
    assert shown is not None
    assert hidden is not None
    assert plain is not None
    assert shown.prompt_tokens > hidden.prompt_tokens == plain.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_call_is_constrained(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    create: Any = client.chat.completions.create
    options = {"parallel_tool_calls": False} if choice == "required" else {}
    answer = create(
        model="fake",
        messages=MESSAGES,
        tools=[WEATHER],
        tool_choice=choice,
        max_tokens=200,
        stream=stream,
        **options,
    )
    if stream:
        chunks = [c.choices[0] for c in answer]
        parts = [part for c in chunks for part in c.delta.tool_calls or ()]
        name, arguments = parts[0].function.name, "".join(p.function.arguments for p in parts)
        reason = chunks[-1].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, answer.choices[0].finish_reason
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"days"}
    assert re.fullmatch(r'\{"days": ?-?\d+\}', arguments), "no white space but what models write"
    assert reason == "tool_calls"


def test_references_are_within_the_parameters_of_their_tool(client: openai.OpenAI) -> None:
    """As generators of schemas write them: to `definitions`, to `$defs`, and by any path from the root."""

    def tool(name: str, reference: str, **beside: Any) -> Any:
        parameters = {"type": "object", "properties": {"a": {"$ref": reference}}, **beside}
        parameters |= {"required": list(parameters["properties"]), "additionalProperties": False}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    draft_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
    older = tool("f", "#/definitions/D", definitions={"D": {"enum": [7]}}, **draft_4)
    newer = tool("g", "#/$defs/D", **{"$defs": {"D": {"const": 8}}})
    whole: Any = {"type": "function", "function": {"name": "i", "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/D",
        "definitions": {"D": {**newer["function"]["parameters"], "properties": {"a": {"const": 6}}}},
    }}}  # fmt: skip
    path = tool("h", "", properties={"a": {"const": 9}, "b": {"$ref": "#/properties/a"}})
    wanted = {"f": {"a": 7}, "g": {"a": 8}, "h": {"a": 9, "b": 9}, "i": {"a": 6}}
    for tools in ([older], [newer], [path], [whole], [newer, path]):
        answer = client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=False
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == wanted[call.function.name]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tool_choice": "required"}, "tools is empty"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice names 'f'"),
        ({"tools": [WEATHER, WEATHER]}, "two functions of one name"),
        ({"tools": [WEATHER], "extra_body": {"structured_outputs": {"regex": "a"}}}, "no tool can be called"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "function.name: String should match"),
        ({"top_logprobs": 2}, "logprobs is not true"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "two names of one limit"),
        ({"stream_options": {"include_usage": True}}, "stream is not true"),
    ],
)
def test_contradictions_are_refused(client: openai.OpenAI, options: Any, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        client.chat.completions.create(model="fake", messages=MESSAGES, **options)


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="fake", input=["ab", "cd"])  # the client asks for base64 by itself
    assert [e.index for e in answer.data] == [0, 1]
    assert all(sum(v * v for v in e.embedding) == pytest.approx(1, abs=1e-6) for e in answer.data)
    assert answer.usage.prompt_tokens == 6
    plain = client.embeddings.create(model="fake", input="ab", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions is 99999"):
        client.embeddings.create(model="fake", input="ab", dimensions=99999)


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as wrong:
        client.completions.create(model="gpt-4", prompt="a")
    assert wrong.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="use_beans is not a field") as unknown:
        client.completions.create(model="fake", prompt="a", extra_body={"use_beans": True})
    assert unknown.value.param == "use_beans"
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model="fake", prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="a sequence holds 512") as too_long:
        client.completions.create(model="fake", prompt="a" * 600)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="exceed the 512 tokens"):
        client.completions.create(model="fake", prompt="a" * 500, max_tokens=100)


async def test_asyncio(server: Served) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.http_url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
    ) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=3)
        assert answer.choices[0].message.content == '!"#'
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=3, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == '!"#'
        texts = await client.completions.create(model="fake", prompt="a", max_tokens=3, stream=True)
        assert "".join([c.choices[0].text async for c in texts]) == "bcd"
        assert len((await client.embeddings.create(model="fake", input="ab")).data) == 1
