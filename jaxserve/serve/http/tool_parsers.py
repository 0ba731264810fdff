"""The formats in which models write tool calls, and a parser for each.

A parser is a small state machine that is fed text as it comes. A whole answer is read by the same machine in one piece,
so that streaming and not streaming cannot differ. Nothing is repaired: text that only looks like a call of a function
that was offered stays text.

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call> after any text, repeated (Hermes, Qwen)
    llama3   {"name": "f", "parameters": {...}} as the whole answer, more after ";" (Llama 3.1 and later)
    list     [{"name": "f", "parameters": {...}}, ...], what `tool_choice: required` is constrained to
    named    the arguments alone, what a named `tool_choice` is constrained to
"""

import enum
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple, Protocol

from jaxserve.serve.http.call_scanner import CallScanner, State


class ToolParser(enum.StrEnum):
    """Formats that a model may be trained on."""

    HERMES = "hermes"
    LLAMA3 = "llama3"


class Piece(NamedTuple):
    """An increment: text for the reader, or of call number `call`: its name with the first piece, then arguments."""

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class CallParser(Protocol):
    """Fed text, gives pieces. Belongs to one sequence."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """Returns the text that was held back, once no text follows."""
        ...


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
TAGS: Mapping[ToolParser, tuple[str, ...]] = {
    ToolParser.HERMES: (_OPEN, _CLOSE),
    ToolParser.LLAMA3: (_PYTHON_TAG,),
}


def choose_parser(wanted: Literal["auto", "hermes", "llama3"], template: str | None) -> ToolParser:
    """The format that a chat template teaches; Hermes' when it teaches none."""
    if wanted != "auto":
        return ToolParser(wanted)
    source = template or ""
    if _OPEN not in source and (_PYTHON_TAG in source or '"parameters"' in source):
        return ToolParser.LLAMA3
    return ToolParser.HERMES


def make_parser(parser: ToolParser, names: Collection[str]) -> CallParser:
    """For `tool_choice: auto`. `names` are the functions that were offered."""
    return {ToolParser.HERMES: HermesParser, ToolParser.LLAMA3: Llama3Parser}[parser](names)


class _Calls:
    """The common part of the formats: reading one call after another. `after` gets the text that follows each."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._num_calls = 0
        self._scanner: CallScanner | None = None

    def begin(self) -> None:
        self._scanner = CallScanner(self._names)

    @property
    def reading(self) -> bool:
        return self._scanner is not None

    def push(self, text: str, pieces: list[Piece]) -> tuple[State, str]:
        """Feeds the open call; returns its state and the text that is left. Text that is no call becomes content."""
        scanner = self._scanner
        assert scanner is not None, "no call is open"
        known = scanner.has_name
        arguments, rest = scanner.push(text)
        if scanner.has_name and (arguments or not known):
            name = None if known else scanner.name
            pieces.append(Piece(call=self._num_calls, name=name, arguments=arguments))
        if scanner.state is State.READING:
            return State.READING, rest
        self._scanner = None
        if scanner.state is State.CALL or scanner.has_name:
            self._num_calls += 1
        else:
            pieces.append(Piece(scanner.raw))
        return scanner.state, rest

    def finish(self) -> list[Piece]:
        """An object that was cut becomes text, unless its name has been sent."""
        scanner, self._scanner = self._scanner, None
        return [Piece(scanner.raw)] if scanner is not None and not scanner.has_name and scanner.raw else []


class HermesParser:
    """Text, with calls between tags. Space around calls is left out."""

    def __init__(self, names: Collection[str]) -> None:
        self._calls = _Calls(names)
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


class Llama3Parser:
    """Calls are the whole answer, or there are none: decided by its first character."""

    def __init__(self, names: Collection[str]) -> None:
        self._calls = _Calls(names)
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._is_text:
                pieces.append(Piece(text))
                break
            if self._calls.reading:
                state, text = self._calls.push(text, pieces)
                self._is_text = state is State.TEXT
                continue
            text, self._held = self._held + text, ""
            text = self._begin(text)
        return pieces

    def _begin(self, text: str) -> str:
        body = text.lstrip(" \t\r\n;")
        if _PYTHON_TAG.startswith(body) and body != _PYTHON_TAG:
            self._held = text
            return ""
        body = body.removeprefix(_PYTHON_TAG).lstrip()
        if not body:
            self._held = text
            return ""
        if body[0] == "{":
            self._calls.begin()
            return body
        self._is_text = True
        return text

    def finish(self) -> list[Piece]:
        pieces = self._calls.finish()
        if self._held.strip(" \t\r\n;"):
            pieces.append(Piece(self._held))
        self._held = ""
        return pieces


class ListParser:
    """A JSON list of calls. The output is constrained to it, so it can only be cut by its length."""

    def __init__(self, names: Collection[str]) -> None:
        self._calls = _Calls(names)

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._calls.reading:
                text = self._calls.push(text, pieces)[1]
                continue
            text = text.lstrip(" \t\r\n[,]")
            if text:
                self._calls.begin()
        return pieces

    def finish(self) -> list[Piece]:
        return self._calls.finish()


class NamedParser:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Piece]:
        name, self._name = self._name, None
        return [Piece(call=0, name=name, arguments=text)] if text or name else []

    def finish(self) -> list[Piece]:
        return []


class NoCalls:
    """All text is text: no tools were offered."""

    def push(self, text: str) -> list[Piece]:
        return [Piece(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


ParserMaker = Callable[[], CallParser]


def _kept(text: str, tag: str) -> int:
    """Characters at the end of `text` that may belong to a tag: its beginning, and space before it."""
    for size in range(min(len(tag) - 1, len(text)), -1, -1):
        if text.endswith(tag[:size]):
            before = text[: len(text) - size]
            return size + len(before) - len(before.rstrip())
    return 0
