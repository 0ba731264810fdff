"""Calls without the marks of their format, which are read where that was asked for: whole, cut, and beside text."""

from typing import Any

import pytest
from http_parts import ToolTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.serve.http.formats import TOOL_FORMATS, BareCalls, NumberedCalls, choose_tool_format
from jaxserve.serve.http.requests import ChatRequest
from jaxserve.serve.http.tools import plan_tools
from jaxserve.text import ChatTemplate

NAMES: dict[str, Any] = {"f": {}, "g": {}}
F, G = '{"name": "f", "arguments": {"x": 1.0}}', '{\n  "parameters": {},\n  "name": "g"\n}'
CALL_F, CALL_G = ("f", '{"x": 1.0}'), ("g", "{}")
CALLS = [
    (F, "", [CALL_F]),
    (f"\n {F}\n", "", [CALL_F]),
    (f"{F}{G}", "", [CALL_F, CALL_G]),
    (f"{F}\n{G}\n", "", [CALL_F, CALL_G]),
    ('{"name": "f", "arguments": null}', "", [("f", "{}")]),
    (f"Let me see.\n\n{F}", "Let me see.", [CALL_F]),
    (f"{F}\nThat is it.", "\nThat is it.", [CALL_F]),
    (f"```json\n{F}\n```", "", [CALL_F]),
    (f"```\n{F}\n{G}\n```\n", "", [CALL_F, CALL_G]),
    (f"I call it:\n```json\n{F}\n```\nDone.", "I call it:\nDone.", [CALL_F]),
    (f"```json\n{F}", "", [CALL_F]),
    (f"```json\n{F}\n``", "", [CALL_F]),
    (f"<tool_call>{F}</tool_call>\n{G}", "", [CALL_F, CALL_G]),
    (f"{G}<tool_call>{F}</tool_call>", "", [CALL_G, CALL_F]),
]
NO_CALLS = [
    "",
    "plain",
    f"text {F}",
    '{"name": "rm", "arguments": {}}',
    '{"name": "f"}',
    '{"arguments": {}}',
    '{"name": "f", "arguments": {}, "id": 1}',
    '{"name": "f", "arguments": {}, "parameters": {}}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": ["f"], "arguments": {}}',
    '{"name": "f", "arguments": {"x": NaN}}',
    '{"name": "f", "argum',
    '{"city": "Riga"} is JSON',
    f'{{"calls":\n{F}\n}}',
    f"[\n{F}\n]",
    f'"{F}"',
    "```python\nprint(1)\n```\nok",
    '```json\n{"a": 1}\n```',
    "```\n```",
    "{",
    "[1] a source, {x} and ``` marks",
]


def read(parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = NumberedCalls(BareCalls(TOOL_FORMATS.get("hermes").make(NAMES), NAMES))
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.name is not None:
            assert piece.call == len(calls)
            calls.append((piece.name, piece.arguments))
        elif piece.arguments:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return "".join(piece.content for piece in pieces), calls


@pytest.mark.parametrize(("text", "content", "calls"), [*CALLS, *((text, text, []) for text in NO_CALLS)])
def test_whole_and_cut(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read([text]) == (content, calls)
    assert read([*text]) == (content, calls)
    for cut in range(1, len(text)):
        assert read([text[:cut], text[cut:]]) == (content, calls), cut


WORDS = [F, G, "{", "}", "[", "]", '"', "```", "json", "\n", " ", "a", '{"name": "f"', ", ", '"arguments": {}']


@settings(max_examples=300, deadline=None, derandomize=True)
@given(words=st.lists(st.sampled_from(WORDS), max_size=12), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_any_text_cut_in_any_way_is_read_as_the_whole(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    ends = [min(cut, len(text)) for cut in sorted(cuts)]
    found = read([text])
    assert read([text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]) == found
    assert read([*text]) == found
    if not found[1] and text.strip():
        assert found[0].strip() == text.strip()


def test_no_part_of_a_call_is_told_as_text_and_other_objects_are_told_as_they_come() -> None:
    parser = BareCalls(TOOL_FORMATS.get("hermes").make(NAMES), NAMES)
    assert [piece for character in F[:-1] for piece in parser.push(character)] == []
    assert [piece.name for piece in parser.push("}")] == ["f"]
    parser = BareCalls(TOOL_FORMATS.get("hermes").make(NAMES), NAMES)
    assert "".join(piece.content for piece in parser.push('{"title": "A')) == '{"title": "A'


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **more}}


ANSWER = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("asked", "more", "is_call"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"tools": [tool("g")]}, False),
        (True, {"tool_choice": "none"}, False),
        (True, {"tools": None}, False),
        (True, {"tools": [tool("f", strict=True), tool("g")]}, False),  # its arguments are promised to fit
        (True, {"tools": [tool("f"), tool("g", strict=True)]}, True),
        (True, {"response_format": ANSWER}, False),  # an object is the answer
    ],
)
def test_where_they_are_read(asked: bool, more: dict[str, Any], is_call: bool) -> None:
    tokenizer = ToolTokenizer()
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool("f")], **more}
    chosen = choose_tool_format("auto", tokenizer.chat_template, reads_bare_calls=asked)
    plan = plan_tools(ChatRequest.model_validate(body), chosen, ChatTemplate.of(tokenizer), tokenizer)
    parser = plan.make()
    pieces = [*parser.push(F), *parser.finish()]
    assert [piece.name for piece in pieces if piece.name] == (["f"] if is_call else [])
    assert is_call or "".join(piece.content for piece in pieces) == F
