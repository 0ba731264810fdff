"""Schemas of tools and answers in every constraint that is made of them: what is refused is refused by name."""

import re
from typing import Any

import pytest
from http_parts import ToolTokenizer

from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.serve.http.formats import THINKING_FORMATS, choose_tool_format
from jaxserve.serve.http.requests import ChatRequest
from jaxserve.serve.http.sampling import structured
from jaxserve.serve.http.thought_grammar import behind_thought
from jaxserve.serve.http.tools import plan_tools
from jaxserve.testing import ByteTokenizer
from jaxserve.text import ChatTemplate
from jaxserve.text.grammar import GrammarCompiler

COMPILER = GrammarCompiler(ByteTokenizer(), 258, (257,))
BAD = {"not": {}}
PATH = {"type": "string", "format": "path"}
WAYS: dict[str, dict[str, Any]] = {
    "named": {"tool_choice": {"type": "function", "function": {"name": "find"}}},
    "required": {"tool_choice": "required"},
    "auto": {},
    "auto with an answer": {"response_format": {"type": "json_object"}},
}


def tool(name: str, part: Any, strict: bool | None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"deep": {"$ref": "#/$defs/D"}}, "$defs": {"D": {"items": part}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def compile_tools(way: str, part: Any, *, strict: bool | None, thinks: bool) -> None:
    """As a request with the tools `weather` and `find` does, of which the second one has the part in its schema."""
    tokenizer = ToolTokenizer()
    tools = [tool("weather", {"type": "string"}, None), tool("find", part, strict)]
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": tools, **WAYS[way]})
    forms = choose_tool_format("hermes", None)
    wanted = plan_tools(body, forms, ChatTemplate.of(tokenizer), tokenizer).forced
    if wanted is not None and thinks:
        wanted = behind_thought(wanted, THINKING_FORMATS.get("qwen3"), has_begun=True, is_ours=True)
    if wanted is not None:
        COMPILER.compile(wanted)


@pytest.mark.parametrize("thinks", [False, True], ids=["", "thinks"])
@pytest.mark.parametrize("way", WAYS)
def test_a_tool_that_cannot_be_compiled_is_named_with_the_place(way: str, thinks: bool) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_tools(way, BAD, strict=True, thinks=thinks)
    words = 'the schema of tool find cannot be compiled at #/$defs/D/items: Unimplemented keys: ["not"]'
    assert str(caught.value) == words


@pytest.mark.parametrize("way", WAYS)
def test_formats_of_texts_are_annotations_unless_the_tool_is_strict(way: str) -> None:
    for strict in (None, False):
        compile_tools(way, PATH, strict=strict, thinks=False)
    with pytest.raises(UnsupportedOption, match="tool find is strict, but its format 'path' at #/.defs/D/items"):
        compile_tools(way, PATH, strict=True, thinks=False)
    compile_tools(way, {"type": "string", "format": "date"}, strict=True, thinks=True)


def test_a_strict_tool_that_is_not_called_stops_nobody() -> None:
    tokenizer = ToolTokenizer()
    tools = [tool("weather", {}, None), tool("find", PATH, True)]
    choice = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice}
    asked = ChatRequest.model_validate(body)
    plan = plan_tools(asked, choose_tool_format("hermes", None), ChatTemplate.of(tokenizer), tokenizer)
    assert plan.forced is not None
    COMPILER.compile(plan.forced)


@pytest.mark.parametrize("thinks", [False, True], ids=["", "thinks"])
@pytest.mark.parametrize(
    ("part", "strict", "words"),
    [
        (PATH, None, None),
        (PATH, False, None),
        (PATH, True, "the schema of the answer is strict, but its format 'path' at #/properties/p cannot be enforced"),
        (BAD, None, "the schema of the answer cannot be compiled at #/properties/p: Unimplemented keys"),
        (BAD, True, "the schema of the answer cannot be compiled at #/properties/p: Unimplemented keys"),
    ],
)
def test_answers(part: Any, strict: bool | None, words: str | None, thinks: bool) -> None:
    given = {"name": "a", "schema": {"type": "object", "properties": {"p": part}}, "strict": strict}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_schema", "json_schema": given},
    }

    def make() -> None:
        wanted = structured(ChatRequest.model_validate(body))
        if thinks and wanted is not None:
            wanted = behind_thought(wanted, THINKING_FORMATS.get("qwen3"), has_begun=True, is_ours=False)
        assert wanted is not None
        COMPILER.compile(wanted)

    if words is None:
        make()
        return
    with pytest.raises(InvalidRequest, match=f"^{re.escape(words)}"):
        make()
