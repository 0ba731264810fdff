"""Hermes' format of calls, which Qwen 2.5 and 3 have, too: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`.

Calls come after any text, repeated; the tags may have line ends within, and several objects.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.serve.http.formats.base import Functions, Piece, ToolFormat, first_of, may_begin
from jaxserve.serve.http.formats.call_scanner import Calls, State

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BETWEEN = " \t\r\n,[]"  # what may stand around the objects between the tags


class HermesParser:
    """Text, with calls between tags. Space around calls is left out."""

    def __init__(self, functions: Functions) -> None:
        self._calls = Calls(functions)
        self._held = ""  # may become a tag
        self._inside = False  # between the tags
        self._has_call = False  # there was a call since the opening tag
        self._owes_end = False  # text came where the closing tag of calls belongs; it is left out when it comes
        self._shown = False  # some text was sent
        self._mark = ""  # the opening tag and what came behind it, in case that no call follows

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._calls.reading:
                text = self._read_call(text, pieces)
                continue
            text, self._held = self._held + text, ""
            text = self._within(text, pieces) if self._inside else self._outside(text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._calls.reading or self._inside:
            left = "".join(piece.content for piece in self._calls.finish())
            left = left if self._has_call else self._mark + left + held
            return [Piece(left)] if left else []
        return [Piece(held)] if held.strip() or (self._shown and held) else []

    def _read_call(self, text: str, pieces: list[Piece]) -> str:
        found: list[Piece] = []
        state, rest = self._calls.push(text, found)
        for piece in found:
            if piece.content:
                self._show(piece.content if self._has_call else self._mark + piece.content, pieces)
            else:
                self._has_call = True
                pieces.append(piece)
        if state is State.TEXT:
            self._inside, self._owes_end = False, self._has_call
        return rest

    def _within(self, text: str, pieces: list[Piece]) -> str:
        """Between the tags, before an object or behind one: there may be several, also as a list."""
        body = text.lstrip(_BETWEEN)
        if not body or (_CLOSE.startswith(body) and body != _CLOSE):
            self._held = text
            return ""
        self._mark += text[: len(text) - len(body)]
        if body[0] == "{":
            self._calls.begin()
            return body
        self._inside = False
        if self._has_call and body.startswith(_CLOSE):
            return body[len(_CLOSE) :]
        if self._has_call:
            self._owes_end = True
            return text
        self._show(self._mark, pieces)
        return body

    def _outside(self, text: str, pieces: list[Piece]) -> str:
        tags = (_OPEN, _CLOSE) if self._owes_end else (_OPEN,)
        start, tag = first_of(text, tags)
        if start < 0:
            keep = _kept(text, tags)
            shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
            self._show(shown, pieces)
            return ""
        shown = text[:start].rstrip()
        self._show(shown, pieces)
        self._owes_end = False
        end = start + len(tag)
        if tag == _OPEN:
            self._inside, self._has_call, self._mark = True, False, text[len(shown) : end]
        return text[end:]

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if not self._shown:
            text = text if text.strip() else ""
        if text:
            self._shown = True
            pieces.append(Piece(text))


def _kept(text: str, tags: Sequence[str]) -> int:
    """Characters at the end of `text` that may belong to a tag: its beginning, and space before it."""
    size = may_begin(text, tags)
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip())


def _grammar(functions: Functions, answer: Mapping[str, Any] | None) -> str:
    """Any text, and calls whose arguments fit their schema; or calls alone, or an answer that fits its own.

    White space is as models write it, or absent.
    """
    calls = [
        f'call_{number}: "{{" SPACE? "\\"name\\":" SPACE? {json.dumps(json.dumps(name))} "," SPACE? '
        f'"\\"arguments\\":" SPACE? %json {json.dumps(schema)} SPACE? "}}"'
        for number, (name, schema) in enumerate(functions.items())
    ]
    return "\n".join(
        [
            "start: call* TEXT" if answer is None else f"start: call+ SPACE? | %json {json.dumps(answer)}",
            "call: begin SPACE? ("
            + " | ".join(f"call_{number}" for number in range(len(calls)))
            + f') SPACE? "{_CLOSE}"',
            *calls,
            f'begin[lazy]: TEXT "{_OPEN}"' if answer is None else f'begin: SPACE? "{_OPEN}"',
            "TEXT: /(.|\\n)*/",
            "SPACE: /[ \\n]{1,8}/",
        ]
    )


FORMAT = ToolFormat(
    make=HermesParser, tags=(_OPEN, _CLOSE), is_taught=lambda template: _OPEN in template, grammar=_grammar
)
