"""Hermes' format of calls, which Qwen 2.5 and 3 have, too: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`.

Calls come after any text, repeated; the tags may have line ends within.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxserve.serve.http.formats.base import Functions, Piece, ToolFormat
from jaxserve.serve.http.formats.call_scanner import Calls, State

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Text, with calls between tags. Space around calls is left out."""

    def __init__(self, functions: Functions) -> None:
        self._calls = Calls(functions)
        self._held = ""  # may become a tag
        self._inside = False  # between the tags
        self._shown = False  # some text was sent
        self._opening = ""  # the tag and the space around it, in case that no object follows

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._calls.reading:
                text = self._read_call(text, pieces)
                continue
            text, self._held = self._held + text, ""
            text = self._between(text) if self._inside else self._outside(text, pieces)
        return [piece for piece in pieces if piece != Piece()]

    def finish(self) -> list[Piece]:
        pieces = [Piece(self._opening + p.content) for p in self._calls.finish()]
        if not self._inside and (self._held.strip() or (self._shown and self._held)):
            pieces.append(Piece(self._held))
        self._held = ""
        return pieces

    def _read_call(self, text: str, pieces: list[Piece]) -> str:
        found: list[Piece] = []
        state, rest = self._calls.push(text, found)
        for piece in found:
            if piece.content:
                self._shown = True
                pieces.append(piece._replace(content=self._opening + piece.content))
            else:
                pieces.append(piece)
        self._inside = state is State.CALL
        return rest

    def _between(self, text: str) -> str:
        """After an object, before its closing tag."""
        stripped = text.lstrip()
        if stripped.startswith(_CLOSE):
            self._inside = False
            return stripped[len(_CLOSE) :]
        if _CLOSE.startswith(stripped):
            self._held = stripped
            return ""
        self._inside = False  # the tag was forgotten; go on as if it had been there
        return stripped

    def _outside(self, text: str, pieces: list[Piece]) -> str:
        start = text.find(_OPEN)
        if start < 0:
            keep = _kept(text, _OPEN)
            shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
            self._show(shown, pieces)
            return ""
        shown = text[:start].rstrip()
        body = text[start + len(_OPEN) :].lstrip()
        self._show(shown, pieces)
        if not body:
            self._held = text[len(shown) :]
            return ""
        self._opening = text[len(shown) : len(text) - len(body)]
        self._calls.begin()
        return body

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if not self._shown:
            text = text if text.strip() else ""
        if text:
            self._shown = True
            pieces.append(Piece(text))


def _kept(text: str, tag: str) -> int:
    """Characters at the end of `text` that may belong to a tag: its beginning, and space before it."""
    for size in range(min(len(tag) - 1, len(text)), -1, -1):
        if text.endswith(tag[:size]):
            before = text[: len(text) - size]
            return size + len(before) - len(before.rstrip())
    return 0


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
