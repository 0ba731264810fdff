"""Transcripts of models through the parsers of their formats: whole, and cut in any way."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transcripts import FUNCTIONS, TRANSCRIPTS, Transcript

from jaxserve.errors import ConfigError
from jaxserve.serve.http.formats import (
    THINKING_FORMATS,
    TOOL_FORMATS,
    AnswerParser,
    Piece,
    ThinkingParser,
    choose_thinking_format,
    choose_tool_format,
)

Read = tuple[str, str, list[tuple[str, str]]]


def parser_of(tools: str, thinking: str, prompt: str) -> AnswerParser:
    parser = choose_tool_format(tools, None).make(FUNCTIONS)
    chosen = choose_thinking_format(thinking, None)
    return parser if chosen is None else ThinkingParser(chosen, parser, has_begun=chosen.has_begun(prompt))


def read(parser: AnswerParser, parts: list[str]) -> Read:
    """Thoughts, text, and the names and arguments of calls."""
    pieces: list[Piece] = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        assert piece != Piece(), "a piece has something in it"
        if piece.call is None:
            continue
        if piece.name is not None:
            assert piece.call == len(calls), "calls are numbered in their order, and named first"
            calls.append((piece.name, ""))
        assert piece.call == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces), calls


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda each: each.name)
def test_a_transcript_is_read_whole_and_in_pieces(transcript: Transcript) -> None:
    def make() -> AnswerParser:
        return parser_of(transcript.tools, transcript.thinking, transcript.prompt)

    found = reasoning, content, calls = read(make(), [transcript.text])
    assert (reasoning, content) == (transcript.reasoning, transcript.content)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == list(transcript.calls)
    assert read(make(), list(transcript.text)) == found
    for cut in range(1, len(transcript.text)):
        assert read(make(), [transcript.text[:cut], transcript.text[cut:]]) == found, cut


def words_of(name: str) -> list[str]:
    """What texts of a format are made of, in any order."""
    tags = {*TOOL_FORMATS.get(name).tags, "<think>", "</think>", "[THINK]"}
    more = ["get_weather", "get_time()", '{"city": "a}"}', "{", "}", "[", "]", '"', "\n", " ", "a", ":", "=", ","]
    more += ["<function=get_time>", "</function>", "<parameter=city>", "</parameter>", "call:get_time{}", "to="]
    return [
        *sorted(tags),
        *more,
        '{"name": "get_time", "arguments": {}}',
        " to=functions.get_time",
        "analysis",
        "final",
    ]


@pytest.mark.parametrize("thinking", ["none", *THINKING_FORMATS.names()])
@pytest.mark.parametrize("tools", TOOL_FORMATS.names())
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_text_cut_in_any_way_is_read_as_the_whole(tools: str, thinking: str, data: Any) -> None:
    words = data.draw(st.lists(st.sampled_from(words_of(tools)), max_size=14))
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = read(parser_of(tools, thinking, ""), [text])
    assert read(parser_of(tools, thinking, ""), parts) == found
    assert read(parser_of(tools, thinking, ""), list(text)) == found


@pytest.mark.parametrize(
    ("wanted", "template", "name"),
    [
        ("auto", None, None),
        ("auto", "{{ messages }}", None),
        ("auto", "{%- if '</think>' in content %}", "qwen3"),
        ("auto", "{{'<｜Assistant｜>'}}{% set content = content.split('</think>')[-1] %}", "deepseek_r1"),  # noqa: RUF001
        ("auto", "[SYSTEM_PROMPT][THINK]", "mistral"),
        ("none", "</think>", None),
        ("qwen3", None, "qwen3"),
    ],
)
def test_thoughts_are_read_off_the_template(wanted: str, template: str | None, name: str | None) -> None:
    assert choose_thinking_format(wanted, template) is (None if name is None else THINKING_FORMATS.get(name))


def test_an_unknown_format_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no format of tool calls is called 'hermse'.*Did you mean 'hermes'"):
        choose_tool_format("hermse", None)
    with pytest.raises(ConfigError, match="no format of thoughts"):
        choose_thinking_format("qwen", None)


def test_ids_of_calls_are_those_that_templates_accept() -> None:
    assert len(TOOL_FORMATS.get("mistral").new_call_id()) == 9
    assert TOOL_FORMATS.get("hermes").new_call_id().startswith("call_")
