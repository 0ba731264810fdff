"""The formats of FunctionGemma and of Gemma 4, which differ in their tags alone.

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>
    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Texts stand between a pair of equal tags without escapes, keys without quotes.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.serve.http.formats.base import AnswerParser, Functions, ToolFormat, read_json
from jaxserve.serve.http.formats.tagged import Call, TaggedParser

_TAGS = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
_QUOTES = {"<start_function_call>": "<escape>", "<|tool_call>": '<|"|>'}
_STRAY = ("<start_function_response>", "<|tool_response>")  # the models go on with the result, if they are not stopped
_HEAD = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:,{}\[\]]+)\s*:")
_BARE = re.compile(r"[^,{}\[\]]*")
_MAX_DEPTH = 64


def _make(functions: Functions) -> AnswerParser:
    def read(tag: str, body: str) -> Sequence[Call] | None:
        head = _HEAD.match(body)
        if head is None or head[1] not in functions:
            return None
        reader = _Reader(body, head.end(), _QUOTES[tag])
        try:
            arguments = reader.read(0)
        except ValueError:
            return None
        return [Call(head[1], arguments)] if reader.at_end else None

    return TaggedParser(_TAGS, read, stray=_STRAY)


class _Reader:
    """Reads one value. All methods raise ValueError for a text that is none."""

    def __init__(self, text: str, place: int, quote: str) -> None:
        self._text = text
        self._place = place
        self._quote = quote

    @property
    def at_end(self) -> bool:
        return not self._text[self._place :].strip()

    def read(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._skip()
        if self._take("{"):
            return self._object(depth)
        if self._take("["):
            return self._list(depth)
        if self._text.startswith(self._quote, self._place):
            return self._quoted(self._quote)
        if self._text.startswith('"', self._place):
            value, self._place = json.JSONDecoder().raw_decode(self._text, self._place)
            return value
        bare = _BARE.match(self._text, self._place)
        assert bare is not None  # it matches nothing at all, too
        self._place = bare.end()
        word = bare[0].strip()
        if not word:
            raise ValueError("a value is missing")
        try:
            return read_json(word)
        except ValueError:
            return word

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._take("}"):
            key = self._key()
            found[key] = self.read(depth + 1)
            if not self._take(",") and not self._peek("}"):
                raise ValueError("no comma")
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._take("]"):
            found.append(self.read(depth + 1))
            if not self._take(",") and not self._peek("]"):
                raise ValueError("no comma")
        return found

    def _key(self) -> str:
        self._skip()
        for quote in (self._quote, '"'):
            if self._text.startswith(quote, self._place):
                key = self._quoted(quote)
                if not self._take(":"):
                    raise ValueError("no colon")
                return key
        key = _KEY.match(self._text, self._place)
        if key is None:
            raise ValueError("no key")
        self._place = key.end()
        return key[1]

    def _quoted(self, quote: str) -> str:
        begin = self._place + len(quote)
        end = self._text.index(quote, begin)
        self._place = end + len(quote)
        return self._text[begin:end]

    def _skip(self) -> None:
        while self._text[self._place : self._place + 1].isspace():
            self._place += 1

    def _peek(self, character: str) -> bool:
        self._skip()
        return self._text.startswith(character, self._place)

    def _take(self, character: str) -> bool:
        found = self._peek(character)
        self._place += int(found)
        return found


FORMAT = ToolFormat(
    make=_make,
    tags=(*_TAGS, *_TAGS.values(), *_QUOTES.values()),
    is_taught=lambda template: any(tag in template for tag in _TAGS),
)
