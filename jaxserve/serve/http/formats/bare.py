"""Calls that a model wrote without the marks of its format: a JSON object that is exactly a call.

Qwen2.5-Coder does so, in a block of code or without one. It is an option (`serve.http.bare_tool_calls`), since an
answer may also show such an object to its reader. The object begins a line, has a name of an offered function, an
object of arguments and nothing else. It is told when it is whole, so that no part of a call is ever told as text; any
other object is told as text as soon as it has another key.
"""

import re
from collections.abc import Mapping

from jaxserve.serve.http.formats.base import AnswerParser, Functions, Piece, Spaced, read_json
from jaxserve.serve.http.formats.call_scanner import ARGUMENT_KEYS, BracketScanner, Calls

_KEYS = tuple(f'"{key}"' for key in ("name", *ARGUMENT_KEYS))
_FENCE = "```"
_FENCE_LINE = re.compile(r"[ \t]*```\w*[ \t]*\r?\n")
_MAX_FENCE = 40  # characters of a line that opens a block of code


class BareCalls:
    """The pieces of another parser, in whose text such calls are found. Belongs to one sequence."""

    def __init__(self, parser: AnswerParser, functions: Functions) -> None:
        self._parser = parser
        self._functions = functions
        self._text = Spaced()
        self._held = ""  # the beginning of a line, as long as a call may begin there
        self._begins_line = True
        self._fence = ""  # the line that opened a block of code, until it is known what is in it
        self._in_block = False  # behind a call in a block of code, whose end is left out
        self._scanner: BracketScanner | None = None  # of an object or a list that is being read
        self._object: list[str] = []  # what has come of it, as long as it may be a call
        self._has_key = False  # its first key is one of a call

    def push(self, text: str) -> list[Piece]:
        return self._read(self._parser.push(text))

    def finish(self) -> list[Piece]:
        pieces = [*self._read(self._parser.finish()), *self._give_up()]
        return [*pieces, *self._text.finish()]

    def _read(self, pieces: list[Piece]) -> list[Piece]:
        told: list[Piece] = []
        for piece in pieces:
            if piece.content:
                left, self._held = self._held + piece.content, ""
                while left:
                    left = self._read_line(left, told) if self._scanner is None else self._read_value(left, told)
            else:
                told += self._give_up()
                if piece.name is not None:
                    self._text.end()
                told.append(piece)
        return told

    def _give_up(self) -> list[Piece]:
        """What is held is no call: no text follows."""
        held = self._fence + "".join(self._object) + self._held
        self._fence = self._held = ""
        self._object, self._scanner, self._begins_line = [], None, True
        in_block, self._in_block = self._in_block, False
        return [] if in_block and _FENCE.startswith(held.strip()) else self._text.push(held)

    def _read_line(self, text: str, told: list[Piece]) -> str:
        """From a place outside of an object up to the end of the line, or to an object."""
        if not self._begins_line:
            size = text.find("\n") + 1
            self._begins_line = size > 0
            told += self._tell(text[: size or len(text)])
            return text[size or len(text) :]
        body = text.lstrip()
        if not body or (_FENCE.startswith(body) and body != _FENCE):
            self._held = text
            return ""
        space = text[: len(text) - len(body)]
        if body[0] in "{[":
            self._scanner = BracketScanner()
            if body[0] == "{":
                self._fence += space
            else:
                told += self._tell(space)
            self._object, self._has_key = [""] if body[0] == "{" else [], False
            return body
        if body.startswith(_FENCE):
            if self._in_block:
                self._in_block = False
                return body[len(_FENCE) :]
            line = _FENCE_LINE.match(body)
            if line is None and "\n" not in body and len(body) < _MAX_FENCE:
                self._held = text
                return ""
            if line is not None and not self._fence:
                self._fence = space + line[0]
                return body[line.end() :]
        told += self._tell(space)
        self._begins_line = self._in_block = False
        return body

    def _read_value(self, text: str, told: list[Piece]) -> str:
        """Within an object or a list."""
        assert self._scanner is not None
        size = self._scanner.push(text)
        is_whole = self._scanner.is_whole
        if self._object:
            self._object.append(text[:size])
            if not self._may_be_call():
                told += self._tell("")
        else:
            told += self._tell(text[:size])
        if is_whole:
            self._scanner = None
            self._end_value(told)
        return text[size:]

    def _end_value(self, told: list[Piece]) -> None:
        written = "".join(self._object)
        if not self._is_call(written):
            told += self._tell("")
            self._begins_line = self._in_block = False
            return
        self._object = []
        self._in_block |= bool(self._fence.strip())
        self._fence = ""
        self._text.end()
        calls = Calls(self._functions)
        calls.begin()
        calls.push(written, told)

    def _may_be_call(self) -> bool:
        """Whether the first key of the object, as far as it has come, is one of a call."""
        if not self._has_key:
            key = "".join(self._object)[1:].lstrip()
            self._has_key = key.startswith(_KEYS)
            return self._has_key or any(each.startswith(key) for each in _KEYS)
        return True

    def _is_call(self, written: str) -> bool:
        try:
            call = read_json(written)
        except (ValueError, RecursionError):
            return False
        if not isinstance(call, Mapping) or len(call) != 2:
            return False
        name, arguments = call.get("name"), next((call[key] for key in ARGUMENT_KEYS if key in call), "")
        return isinstance(name, str) and name in self._functions and isinstance(arguments, Mapping | None)

    def _tell(self, text: str) -> list[Piece]:
        """Text, behind what was held as long as a call was possible."""
        held = self._fence + "".join(self._object)
        self._fence, self._object = "", []
        return self._text.push(held + text) if held or text else []
