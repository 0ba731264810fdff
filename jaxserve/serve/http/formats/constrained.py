"""Parsers of output that is constrained to calls: a list for `required`, the arguments alone for a named function."""

from collections.abc import Collection

from jaxserve.serve.http.formats.base import Piece
from jaxserve.serve.http.formats.call_scanner import Calls


class ListParser:
    """A JSON list of calls. The output is constrained to it, so it can only be cut by its length."""

    def __init__(self, names: Collection[str]) -> None:
        self._calls = Calls(names)

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
        return [Piece(name=name, arguments=text)] if text or name else []

    def finish(self) -> list[Piece]:
        return []
