"""Calls between two tags, read when they are whole: for formats whose arguments are not written as JSON.

A call in such a format can only be told once all of it is there, since its arguments become JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.serve.http.formats.base import Piece, Spaced, first_of, may_begin, write_json


class Call(NamedTuple):
    """A function and its arguments."""

    name: str
    arguments: Mapping[str, Any]


class TaggedParser:
    """Text with calls in it. Belongs to one sequence.

    Args:
      tags: of each opening tag, the closing one.
      read: what is between a pair of tags, which are given to it as well, as calls; None: it is no call.
      stray: tags that mean nothing where they follow a call.
    """

    def __init__(
        self, tags: Mapping[str, str], read: Callable[[str, str], Sequence[Call] | None], stray: Sequence[str] = ()
    ) -> None:
        self._tags = tags
        self._read = read
        self._stray = stray
        self._text = Spaced()
        self._held = ""
        self._open: str | None = None
        self._behind_call = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        left, self._held = self._held + text, ""
        while left:
            left = self._outside(left, pieces) if self._open is None else self._inside(left, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """A call whose closing tag was forgotten is still a call."""
        held, self._held = self._held, ""
        if self._open is None:
            return [] if self._behind_call and not held.strip() else [*self._text.push(held), *self._text.finish()]
        calls = self._read(self._open, held)
        if calls is not None:
            return self._tell(calls)
        return [*self._text.push(self._open + held), *self._text.finish()]

    def _outside(self, text: str, pieces: list[Piece]) -> str:
        if self._behind_call:
            stripped = text.lstrip()
            for tag in self._stray:
                if stripped.startswith(tag):
                    return stripped[len(tag) :]
            if not stripped or any(tag.startswith(stripped) for tag in self._stray):
                self._held = text
                return ""
            self._behind_call = False
        place, tag = first_of(text, list(self._tags))
        if place < 0:
            size = may_begin(text, list(self._tags))
            pieces += self._text.push(text[: len(text) - size])
            self._held = text[len(text) - size :]
            return ""
        pieces += self._text.push(text[:place])
        self._open = tag
        return text[place + len(tag) :]

    def _inside(self, text: str, pieces: list[Piece]) -> str:
        assert self._open is not None
        close = self._tags[self._open]
        place = text.find(close)
        if place < 0:
            self._held = text
            return ""
        body, rest = text[:place], text[place + len(close) :]
        calls = self._read(self._open, body)
        if calls is None:
            pieces += self._text.push(self._open + body + close)
        else:
            pieces += self._tell(calls)
        self._open = None
        return rest

    def _tell(self, calls: Sequence[Call]) -> list[Piece]:
        self._text.end()
        self._behind_call = True
        return [Piece(name=call.name, arguments=write_json(call.arguments)) for call in calls]
