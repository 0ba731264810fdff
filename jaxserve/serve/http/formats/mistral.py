"""Mistral's formats of calls. Text may come before the tag, which is a special token.

[TOOL_CALLS][{"name": "f", "arguments": {...}, "id": "..."}, ...]     up to the tokenizer of version 7
[TOOL_CALLS]f{...}[TOOL_CALLS]g{...}                                  from version 11 on; also f[ARGS]{...},
[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}                            and with an id
"""

import re
import secrets
import string

from jaxserve.serve.http.formats.base import Functions, Piece, Spaced, ToolFormat, may_begin
from jaxserve.serve.http.formats.call_scanner import BracketScanner
from jaxserve.serve.http.formats.constrained import ListParser

_OPEN, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(r"\s*([\w.-]+?)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*\Z")
_MAX_HEAD = 200  # characters between the tag and the arguments


class MistralParser:
    """Belongs to one sequence."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._text = Spaced()
        self._held = ""
        self._is_head = False  # between the tag and the arguments
        self._list: ListParser | None = None
        self._value: BracketScanner | None = None  # the end of the list, or of the arguments of a call

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        left, self._held = self._held + text, ""
        while left:
            if self._value is not None:
                left = self._read_value(left, pieces)
            elif self._is_head:
                left = self._read_head(left, pieces)
            else:
                left = self._read_text(left, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        if self._list is not None:
            return self._list.finish()
        held, self._held = self._held, ""
        return [*self._text.push(_OPEN + held if self._is_head else held), *self._text.finish()]

    def _read_text(self, text: str, pieces: list[Piece]) -> str:
        place = text.find(_OPEN)
        if place < 0:
            size = may_begin(text, (_OPEN,))
            pieces += self._text.push(text[: len(text) - size])
            self._held = text[len(text) - size :]
            return ""
        pieces += self._text.push(text[:place])
        self._is_head = True
        return text[place + len(_OPEN) :]

    def _read_head(self, text: str, pieces: list[Piece]) -> str:
        body = text.lstrip()
        if body.startswith("[{") or (body.startswith("[") and body[1:].lstrip().startswith("{")):
            self._text.end()
            self._is_head, self._list, self._value = False, ListParser(self._functions), BracketScanner()
            return body
        place = text.find("{")
        if place < 0 and len(text) < _MAX_HEAD:
            self._held = text
            return ""
        self._is_head = False
        name = _HEAD.match(text[: max(0, place)])
        if name is None or name[1] not in self._functions:
            pieces += self._text.push(_OPEN)
            return text
        self._text.end()
        pieces.append(Piece(name=name[1]))
        self._value = BracketScanner()
        return text[place:]

    def _read_value(self, text: str, pieces: list[Piece]) -> str:
        assert self._value is not None
        size = self._value.push(text)
        if self._list is not None:
            pieces += self._list.push(text[:size])
        else:
            pieces.append(Piece(arguments=text[:size]))
        if self._value.is_whole:
            self._list = self._value = None
        return text[size:]


def _new_call_id() -> str:
    """The templates of these models refuse any other length."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


FORMAT = ToolFormat(
    make=MistralParser,
    tags=(_OPEN, _ARGS, _CALL_ID),
    is_taught=lambda template: _OPEN in template,
    new_call_id=_new_call_id,
)
