"""The meaning of `tools` and `tool_choice` in a chat: the tools in the template, the grammar of the output, its parser.

The formats of calls are in `formats`. A combination that could not work is refused, since a tool that is dropped
in silence looks to a client like a model that will not call it.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.serve.http.formats import (
    AnswerParser,
    BareCalls,
    Functions,
    ListParser,
    NamedParser,
    NoCalls,
    NumberedCalls,
    ParserMaker,
    ToolFormat,
)
from jaxserve.serve.http.requests import (
    AllowedTools,
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    Tool,
    functions_of,
)
from jaxserve.serve.http.responses import as_fields
from jaxserve.serve.http.sampling import answer_schema, schema_output
from jaxserve.text import ChatTemplate, Tokenizer
from jaxserve.text.json_schema import check_formats, compact, enforceable, named
from jaxserve.values.structured_output import StructuredOutput

_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """One chat's tools.

    Attributes:
      shown: tools for the template; None: no tools.
      forced: the form to which the output is constrained.
      make: a parser for each sequence.
      is_free: the output is text in which there may be thoughts and calls; else all of it is constrained.
      keep_special_tokens: the tags of calls are special tokens of this vocabulary.
    """

    shown: Sequence[Mapping[str, Any]] | None
    forced: StructuredOutput | None
    make: ParserMaker
    is_free: bool = True
    keep_special_tokens: bool = False


def plan_tools(body: ChatRequest, tool_format: ToolFormat, template: ChatTemplate, tokenizer: Tokenizer) -> ToolUse:
    """Raises InvalidRequest for a contradictory choice, UnsupportedOption where this model cannot follow it."""
    specials = {tokenizer.token_text(token_id) for token_id in tokenizer.special_ids}
    has_special_tags = not specials.isdisjoint(tool_format.tags)
    if tool_format.has_channels:
        none = ToolUse(shown=None, forced=None, make=lambda: tool_format.make({}), keep_special_tokens=has_special_tags)
    else:
        none = ToolUse(shown=None, forced=None, make=NoCalls)
    choice = body.tool_choice
    functions = functions_of(body.tools)
    if not functions:
        if choice not in (None, "none", "auto"):
            foreign = ", ".join(sorted({tool.type for tool in body.tools or ()}))
            why = f"those of tools ({foreign:.200}) belong to a provider" if foreign else "tools is empty"
            raise InvalidRequest(f"tool_choice demands a call of a function, but {why}; give functions")
        return none
    tools = {tool.function.name: tool for tool in functions}
    if len(tools) != len(functions):
        raise InvalidRequest("tools has two functions of one name; give each a name of its own")
    if isinstance(choice, AllowedTools):
        allowed = {_known(tool.function.name, tools) for tool in choice.allowed_tools.tools}
        if not allowed:
            raise InvalidRequest("tool_choice allows no tool; name one, or set it to none")
        tools = {name: tool for name, tool in tools.items() if name in allowed}
        choice = choice.allowed_tools.mode
    if choice == "none":
        return none
    if not template.reads("tools"):
        raise UnsupportedOption(
            "this model's chat template has no place for tools, so the model would never see them; leave tools out, "
            "or set tool_choice to none"
        )
    if body.structured_outputs is not None:
        raise InvalidRequest(
            "the output is constrained by structured_outputs, so that no tool can be called; set tool_choice to none, "
            "or leave the constraint out"
        )
    shown = [as_fields(tool) for tool in tools.values()]
    functions = {name: named(_parameters(tool), _schema_name(name)) for name, tool in tools.items()}
    strict = {name for name, tool in tools.items() if tool.function.strict}
    if isinstance(choice, NamedTool):
        name = _known(choice.function.name, tools)
        _check_strict({name: functions[name]}, strict)
        return ToolUse(
            shown=shown,
            forced=schema_output(functions[name]),
            make=lambda: NumberedCalls(NamedParser(name)),
            is_free=False,
        )
    if choice == "required":
        _check_strict(functions, strict)
        schema = _list_schema(functions, 1 if body.parallel_tool_calls is False else None)
        return ToolUse(
            shown=shown, forced=schema_output(schema), make=lambda: NumberedCalls(ListParser(functions)), is_free=False
        )
    answer = _answer_schema(body)
    if answer is not None and (tool_format.grammar is None or has_special_tags):
        raise UnsupportedOption(
            "response_format constrains the answer, and this model's format of calls cannot be part of the constraint; "
            "demand a call by tool_choice, set it to none, or leave the constraint out"
        )
    forced = None if has_special_tags else _grammar(functions, strict, tool_format, answer)
    # A grammar holds the arguments of marked calls alone, and an answer that fits its own schema is no call.
    bare = {name: schema for name, schema in functions.items() if forced is None or name not in strict}
    return ToolUse(
        shown=shown,
        forced=forced,
        make=lambda: _free_parser(tool_format, functions, {} if answer is not None else bare),
        is_free=answer is None,
        keep_special_tokens=has_special_tags,
    )


def _free_parser(tool_format: ToolFormat, functions: Functions, bare: Functions) -> AnswerParser:
    """A parser of text with calls; `bare`: those functions whose calls are read without their marks, if any are."""
    parser = tool_format.make(functions)
    return NumberedCalls(BareCalls(parser, bare)) if tool_format.reads_bare_calls and bare else parser


def _answer_schema(body: ChatRequest) -> dict[str, Any] | None:
    """The schema of an answer that is no call; None: it is free."""
    if isinstance(body.response_format, JsonObjectFormat):
        return {"type": "object"}
    return answer_schema(body.response_format) if isinstance(body.response_format, JsonSchemaFormat) else None


def _grammar(
    functions: Functions, strict: Collection[str], tool_format: ToolFormat, answer: Mapping[str, Any] | None
) -> StructuredOutput | None:
    """Answers in which the arguments of strict functions fit their schema, and what is no call fits `answer`.

    None: there is nothing to enforce, or no grammar is known. A grammar is of text, and tags of calls have to be text.
    """
    if tool_format.grammar is None or (answer is None and not strict):
        return None
    _check_strict(functions, strict)
    schemas = {
        name: _enforceable(parameters if name in strict else _ANY_ARGUMENTS) for name, parameters in functions.items()
    }
    return StructuredOutput(grammar=tool_format.grammar(schemas, None if answer is None else _enforceable(answer)))


def _check_strict(functions: Functions, strict: Collection[str]) -> None:
    """Raises UnsupportedOption for a strict function whose schema asks for a format of texts in vain."""
    for name in strict:
        if name in functions:
            check_formats(functions[name], _schema_name(name))


def _schema_name(name: str) -> str:
    return f"schema of tool {name}"


def _enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(enforceable(json.dumps(compact(schema))))


def _known(name: str, names: Collection[str]) -> str:
    """The name itself. Raises InvalidRequest for one that is not that of a tool."""
    if name not in names:
        raise InvalidRequest(f"tool_choice names {name!r:.80}, but tools has {', '.join(names)}")
    return name


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or _NO_ARGUMENTS


def _list_schema(functions: Functions, most: int | None) -> dict[str, Any]:
    """A list of calls. The parameters of each tool are a schema resource of their own, so that `#` in a reference is
    the root of these parameters (JSON Schema 2020-12, 8.2.1), wherever their definitions stand. Their `$schema` goes:
    older drafts name a resource in another way, or not at all beside a reference."""
    calls = []
    for number, (name, parameters) in enumerate(functions.items()):
        fields = {key: value for key, value in parameters.items() if key != "$schema"}
        resource = {**fields, "$id": f"tool://jaxserve/{number}"}
        properties = {"name": {"enum": [name]}, "parameters": resource}
        required = ["name", "parameters"]
        call = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        calls.append(call)
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if most is not None:
        schema["maxItems"] = most
    return schema
