"""The formats of FunctionGemma and of Gemma 4, which differ in their tags alone.

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>
    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Texts stand between a pair of equal tags without escapes, keys without quotes. What a model writes without its quotes is
typed by the schema (`typed_text`). There may be several calls between two tags.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.serve.http.formats.base import AnswerParser, Functions, ToolFormat
from jaxserve.serve.http.formats.tagged import Call, TaggedParser
from jaxserve.serve.http.formats.typed_text import TypedText

_TAGS = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
_QUOTES = {"<start_function_call>": "<escape>", "<|tool_call>": '<|"|>'}
_STRAY = ("<start_function_response>", "<|tool_response>")  # the models go on with the result, if they are not stopped
_HEAD = re.compile(r"[\s,;]*call:([^\s{]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:,{}\[\]]+)\s*:")
_BARE = re.compile(r"[^,{}\[\]]*")
_MAX_DEPTH = 64


def _make(functions: Functions) -> AnswerParser:
    schemas = {name: TypedText(schema) for name, schema in functions.items()}

    def read(tag: str, body: str) -> Sequence[Call] | None:
        calls: list[Call] = []
        place = 0
        while (head := _HEAD.match(body, place)) is not None:
            if head[1] not in schemas:
                return None
            schema = schemas[head[1]]
            reader = _Reader(body, head.end(), _QUOTES[tag], schema)
            try:
                calls.append(Call(head[1], reader.read(schema.root, 0)))
            except ValueError:
                return None
            place = reader.place
        return calls if calls and not body[place:].strip() else None

    return TaggedParser(_TAGS, read, stray=_STRAY)


class _Reader:
    """Reads one value, from `place` on. All methods raise ValueError for a text that is none."""

    def __init__(self, text: str, place: int, quote: str, schema: TypedText) -> None:
        self.place = place
        self._text = text
        self._quote = quote
        self._schema = schema

    def read(self, typed: Any, depth: int) -> Any:
        """`typed`: the place of the value in the schema."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._skip()
        if self._take("{"):
            return self._object(typed, depth)
        if self._take("["):
            return self._list(typed, depth)
        if self._text.startswith(self._quote, self.place):
            return self._quoted(self._quote)
        if self._text.startswith('"', self.place):
            value, self.place = json.JSONDecoder().raw_decode(self._text, self.place)
            return value
        bare = _BARE.match(self._text, self.place)
        assert bare is not None  # it matches nothing at all, too
        self.place = bare.end()
        word = bare[0].strip()
        if not word:
            raise ValueError("a value is missing")
        return self._schema.value(word, typed)

    def _object(self, typed: Any, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._take("}"):
            key = self._key()
            found[key] = self.read(self._schema.member(typed, key), depth + 1)
            if not self._take(",") and not self._peek("}"):
                raise ValueError("no comma")
        return found

    def _list(self, typed: Any, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._take("]"):
            found.append(self.read(self._schema.item(typed, len(found)), depth + 1))
            if not self._take(",") and not self._peek("]"):
                raise ValueError("no comma")
        return found

    def _key(self) -> str:
        self._skip()
        for quote in (self._quote, '"'):
            if self._text.startswith(quote, self.place):
                key = self._quoted(quote)
                if not self._take(":"):
                    raise ValueError("no colon")
                return key
        key = _KEY.match(self._text, self.place)
        if key is None:
            raise ValueError("no key")
        self.place = key.end()
        return key[1]

    def _quoted(self, quote: str) -> str:
        begin = self.place + len(quote)
        end = self._text.index(quote, begin)
        self.place = end + len(quote)
        return self._text[begin:end]

    def _skip(self) -> None:
        while self._text[self.place : self.place + 1].isspace():
            self.place += 1

    def _peek(self, character: str) -> bool:
        self._skip()
        return self._text.startswith(character, self.place)

    def _take(self, character: str) -> bool:
        found = self._peek(character)
        self.place += int(found)
        return found


FORMAT = ToolFormat(
    make=_make,
    tags=(*_TAGS, *_TAGS.values(), *_QUOTES.values()),
    is_taught=lambda template: any(tag in template for tag in _TAGS),
)
