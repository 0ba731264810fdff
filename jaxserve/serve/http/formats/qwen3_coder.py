"""The format of Qwen3-Coder: arguments as texts between tags, without quotes or escapes.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The schema of the function says which of them are numbers, lists and so on. The models leave out the outer opening tag
now and then.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.serve.http.formats.base import AnswerParser, Functions, ToolFormat, read_json
from jaxserve.serve.http.formats.tagged import Call, TaggedParser

_OPEN, _CLOSE, _FUNCTION, _END = "<tool_call>", "</tool_call>", "<function=", "</function>"
_NAME = re.compile(r"\s*([^\s>]+)\s*>")
# A value ends at its closing tag, or where the model forgot that, at the next parameter.
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)


def _make(functions: Functions) -> AnswerParser:
    def read(tag: str, body: str) -> Sequence[Call] | None:
        parts = body.split(_FUNCTION)[1:] if tag == _OPEN else [body]
        calls = [_read(part, functions) for part in parts]
        return None if not calls or None in calls else [call for call in calls if call is not None]

    return TaggedParser({_OPEN: _CLOSE, _FUNCTION: _END}, read, stray=(_CLOSE,))


def _read(text: str, functions: Functions) -> Call | None:
    name = _NAME.match(text)
    if name is None or name[1] not in functions:
        return None
    properties = functions[name[1]].get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    found = _PARAMETER.findall(text[name.end() :])
    return Call(name[1], {key.strip(): _value(value, known.get(key.strip())) for key, value in found})


def _value(text: str, schema: Any) -> Any:
    """A text where the schema allows one; else the JSON that it is, and a text if it is none. The schema is the
    client's, and may be wrong."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds and text != "null"):
        return text
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


FORMAT = ToolFormat(make=_make, tags=(_OPEN, _CLOSE), is_taught=lambda template: _FUNCTION in template)
