"""The formats in which models write their thoughts and their tool calls, and a parser for each.

A parser is a small state machine that is fed text as it comes. A whole answer is read by the same machine in one piece,
so that streaming and not streaming cannot differ. Nothing is repaired: text that only looks like a call of a function
that was offered stays text.

    base         Piece, the protocol of a parser, the counter of calls, and what a format says of itself
    bare         calls without their marks, in the text of any format
    constrained  what the output is constrained to if `tool_choice` demands a call
    tagged       calls between two tags, read when they are whole: for formats whose arguments are not written as JSON
    typed_text   arguments that are written without quotes, typed by their schema
    thinking     a thought between two tags at the beginning of an answer, before any format of calls
    call_scanner, hermes, llama3, qwen3_coder, mistral, gemma, pythonic, harmony     one format a file

The format of a model is found from its chat template, which shows the model how to write. A further format is a file
and a line of a registry here, or an entry point of another package in the same group.
"""

import dataclasses
from typing import TypeVar

from jaxserve.serve.http.formats.bare import BareCalls
from jaxserve.serve.http.formats.base import (
    AnswerParser,
    Functions,
    NoCalls,
    NumberedCalls,
    ParserMaker,
    Piece,
    ThinkingFormat,
    ToolFormat,
)
from jaxserve.serve.http.formats.constrained import ListParser, NamedParser
from jaxserve.serve.http.formats.thinking import ThinkingParser
from jaxserve.values.registry import Registry

__all__ = [
    "THINKING_FORMATS",
    "TOOL_FORMATS",
    "AnswerParser",
    "BareCalls",
    "Functions",
    "ListParser",
    "NamedParser",
    "NoCalls",
    "NumberedCalls",
    "ParserMaker",
    "Piece",
    "ThinkingFormat",
    "ThinkingParser",
    "ToolFormat",
    "choose_thinking_format",
    "choose_tool_format",
]

_HERE = "jaxserve.serve.http.formats"
# In the order in which templates are asked: a later format may have tags that an earlier one has, too.
TOOL_FORMATS: Registry[ToolFormat] = Registry(
    "format of tool calls",
    "jaxserve.tool_formats",
    {
        "gpt_oss": f"{_HERE}.harmony:FORMAT",
        "gemma": f"{_HERE}.gemma:FORMAT",
        "mistral": f"{_HERE}.mistral:FORMAT",
        "qwen3_coder": f"{_HERE}.qwen3_coder:FORMAT",
        "pythonic": f"{_HERE}.pythonic:FORMAT",
        "hermes": f"{_HERE}.hermes:FORMAT",
        "llama3": f"{_HERE}.llama3:FORMAT",
    },
)
THINKING_FORMATS: Registry[ThinkingFormat] = Registry(
    "format of thoughts",
    "jaxserve.thinking_formats",
    {
        "deepseek_r1": f"{_HERE}.thinking:DEEPSEEK_R1",
        "qwen3": f"{_HERE}.thinking:QWEN3",
        "mistral": f"{_HERE}.thinking:MISTRAL",
    },
)
_Format = TypeVar("_Format", ToolFormat, ThinkingFormat)


def choose_tool_format(wanted: str, template: str | None, *, reads_bare_calls: bool = False) -> ToolFormat:
    """The format of a name; for "auto" that which a chat template teaches, and Hermes' when it teaches none.

    `reads_bare_calls`: as of `ToolFormat`. Raises ConfigError for a name that does not exist.
    """
    found = _choose(TOOL_FORMATS, wanted, template) or TOOL_FORMATS.get("hermes")
    return dataclasses.replace(found, reads_bare_calls=True) if reads_bare_calls else found


def choose_thinking_format(wanted: str, template: str | None) -> ThinkingFormat | None:
    """The same for thoughts. None for "none", and for "auto" when a template teaches no thoughts."""
    return None if wanted == "none" else _choose(THINKING_FORMATS, wanted, template)


def _choose(registry: "Registry[_Format]", wanted: str, template: str | None) -> _Format | None:
    if wanted != "auto":
        return registry.get(wanted)
    formats = (registry.get(name) for name in registry.names())
    return next((each for each in formats if each.is_taught(template or "")), None)
