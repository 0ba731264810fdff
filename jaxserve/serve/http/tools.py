"""The meaning of `tools` and `tool_choice` in a chat: the tools in the template, the grammar of the output, its parser.

The formats of calls are in `tool_parsers`. A combination that could not work is refused, since a tool that is dropped
in silence looks to a client like a model that will not call it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api import StructuredOutput
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.serve.http.requests import ChatRequest, NamedTool, Tool
from jaxserve.serve.http.responses import as_fields
from jaxserve.serve.http.sampling import schema_output, structured
from jaxserve.serve.http.tool_parsers import (
    TAGS,
    ListParser,
    NamedParser,
    NoCalls,
    ParserMaker,
    ToolParser,
    make_parser,
)
from jaxserve.text import ChatTemplate, Tokenizer

# Models write a blank after a comma and a colon, or none. Left free, one can fill an answer with white space.
_COMPACT: dict[str, Any] = {"whitespace_pattern": "", "item_separator": ", ?", "key_separator": ": ?"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """One chat's tools.

    Attributes:
      shown: tools for the template; None: no tools.
      forced: the form to which the output is constrained.
      make: a parser for each sequence.
      keep_special_tokens: the tags of calls are special tokens of this vocabulary.
    """

    shown: Sequence[Mapping[str, Any]] | None
    forced: StructuredOutput | None
    make: ParserMaker
    keep_special_tokens: bool = False


_NONE = ToolUse(shown=None, forced=None, make=NoCalls)


def plan_tools(body: ChatRequest, parser: ToolParser, template: ChatTemplate, tokenizer: Tokenizer) -> ToolUse:
    """Raises InvalidRequest for a contradictory choice, UnsupportedOption where this model cannot follow it."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice demands a call, but tools is empty; give the tools")
        return _NONE
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) != len(names):
        raise InvalidRequest("tools has two functions of one name; give each a name of its own")
    if choice == "none":
        return _NONE
    if not template.reads("tools"):
        raise UnsupportedOption(
            "this model's chat template has no place for tools, so the model would never see them; leave tools out, "
            "or set tool_choice to none"
        )
    shown = [as_fields(tool) for tool in body.tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise InvalidRequest(f"tool_choice names {name!r}, but tools has {', '.join(names)}")
        tool = body.tools[names.index(name)]
        return ToolUse(shown=shown, forced=_compact(_parameters(tool)), make=lambda: NamedParser(name))
    if choice == "required":
        schema = _list_schema(body.tools, 1 if body.parallel_tool_calls is False else None)
        return ToolUse(shown=shown, forced=_compact(schema), make=lambda: ListParser(names))
    if structured(body) is not None:
        raise InvalidRequest(
            "the output is constrained by response_format or structured_outputs, so that no tool can be called; set "
            "tool_choice to none, or leave the constraint out"
        )
    specials = {tokenizer.token_text(token_id) for token_id in tokenizer.special_ids}
    return ToolUse(
        shown=shown,
        forced=None,
        make=lambda: make_parser(parser, names),
        keep_special_tokens=not specials.isdisjoint(TAGS[parser]),
    )


def _compact(schema: dict[str, Any]) -> StructuredOutput:
    """Text that fits the schema, without runs of white space unless the schema says how they are to be."""
    return schema_output({"x-guidance": _COMPACT, **schema})


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or _NO_ARGUMENTS


def _list_schema(tools: Sequence[Tool], most: int | None) -> dict[str, Any]:
    """A list of calls. `$defs` of a tool's schema move up, where its references look for them."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(_parameters(tool))
        moved = parameters.pop("$defs", {})
        if not isinstance(moved, dict):
            raise InvalidRequest(f"the parameters of {tool.function.name} have $defs that are no object")
        for name, definition in moved.items():
            if definitions.setdefault(name, definition) != definition:
                raise InvalidRequest(f"two tools define {name!r} in $defs, each in its own way; rename one")
        properties = {"name": {"enum": [tool.function.name]}, "parameters": parameters}
        required = ["name", "parameters"]
        call = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        calls.append(call)
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if most is not None:
        schema["maxItems"] = most
    if definitions:
        schema["$defs"] = definitions
    return schema
