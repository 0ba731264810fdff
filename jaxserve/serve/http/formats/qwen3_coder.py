"""The format of Qwen3-Coder: arguments as texts between tags, without quotes or escapes.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The schema of the function says which of them are numbers, lists and so on (`typed_text`). The models leave out the
outer opening tag now and then.
"""

import re
from collections.abc import Mapping, Sequence

from jaxserve.serve.http.formats.base import AnswerParser, Functions, ToolFormat
from jaxserve.serve.http.formats.tagged import Call, TaggedParser
from jaxserve.serve.http.formats.typed_text import TypedText

_OPEN, _CLOSE, _FUNCTION, _END = "<tool_call>", "</tool_call>", "<function=", "</function>"
_NAME = re.compile(r"\s*([^\s>]+)\s*>")
# A value ends at its closing tag, or where the model forgot that, at the next parameter.
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)


def _make(functions: Functions) -> AnswerParser:
    schemas = {name: TypedText(schema) for name, schema in functions.items()}

    def read(tag: str, body: str) -> Sequence[Call] | None:
        parts = body.split(_FUNCTION)[1:] if tag == _OPEN else [body]
        calls = [_read(part, schemas) for part in parts]
        return None if not calls or None in calls else [call for call in calls if call is not None]

    return TaggedParser({_OPEN: _CLOSE, _FUNCTION: _END}, read, stray=(_CLOSE,))


def _read(text: str, schemas: Mapping[str, TypedText]) -> Call | None:
    name = _NAME.match(text)
    if name is None or name[1] not in schemas:
        return None
    schema = schemas[name[1]]
    found = [(key.strip(), value) for key, value in _PARAMETER.findall(text[name.end() :])]
    return Call(name[1], {key: schema.value(value, schema.member(schema.root, key)) for key, value in found})


FORMAT = ToolFormat(make=_make, tags=(_OPEN, _CLOSE), is_taught=lambda template: _FUNCTION in template)
