"""One tool call, read character by character: `{"name": ..., "arguments": {...}}` as models write it.

The name and the text of the arguments are found while the object is still being written. Nothing is repaired: text that
is no such object is given back as it came, and the caller shows it as text. It is not a JSON parser: it only
follows strings and brackets, which is all that is needed to know where a value ends.
"""

import enum
import json
from collections.abc import Collection
from typing import NamedTuple

from jaxserve.serve.http.formats.base import Piece, whole_characters

ARGUMENT_KEYS = ("arguments", "parameters")


class State(enum.Enum):
    """READING until the closing bracket; then CALL, or TEXT when it is no call of a known function."""

    READING = enum.auto()
    CALL = enum.auto()
    TEXT = enum.auto()


class Scanned(NamedTuple):
    """`arguments`: new text of them. `rest`: what followed the object."""

    arguments: str
    rest: str


class CallScanner:
    """Reads one object that begins at the first character pushed. Mutated by its owner through `push`.

    Attributes:
      name: the function's name once it is known and is one of `names`.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.state = State.READING
        self.name: str | None = None
        self._raw: list[str] = []
        self._names = names
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None  # of the value being read, at depth 1
        self._token = ""  # the key or the value being read, at depth 1
        self._arguments: list[str] = []  # characters that were not returned yet, or all of a JSON text
        self._as_text = False  # the arguments are a JSON text
        self._has_arguments = False

    @property
    def has_name(self) -> bool:
        return self.name is not None

    @property
    def raw(self) -> str:
        """Everything read so far; what to show when `state` is TEXT."""
        return "".join(self._raw)

    def push(self, text: str) -> Scanned:
        """Takes more text. Once the name is known, arguments are returned as they are read."""
        assert self.state is State.READING, self.state
        for position, character in enumerate(text):
            self._raw.append(character)
            self._take(character)
            if self.state is not State.READING:
                return Scanned(self._news(), text[position + 1 :])
        return Scanned(self._news(), "")

    def _news(self) -> str:
        # Arguments written as a JSON text are returned when they are whole, since escapes may be cut.
        if self.name is None or (self._as_text and self.state is State.READING):
            return ""
        told = "".join(self._arguments)
        self._arguments.clear()
        return told

    def _take(self, character: str) -> None:
        if self._in_string:
            self._append(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
            self._append(character)
        elif character in "{[":
            self._depth += 1
            if self._depth == 1:
                self.state = State.READING if character == "{" else State.TEXT
            else:
                self._append(character)
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self._finish()
            else:
                self._append(character)
        elif self._depth == 1 and character == ":" and self._key is None:
            self._key = _text_of(self._token)
            self._token = ""
            if self._key is None:
                self.state = State.TEXT
            elif self._key in ARGUMENT_KEYS and self._has_arguments:
                self._key = ""  # given twice, and the first may have been told
        elif self._depth == 1 and character == ",":
            self._end_value()
        elif self._depth == 0:
            self.state = State.TEXT
        else:
            self._append(character)

    def _append(self, character: str) -> None:
        if self._key in ARGUMENT_KEYS:
            if self._depth > 1 or self._in_string or not character.isspace():
                self._as_text |= not self._has_arguments and character == '"'
                self._has_arguments = True
                self._arguments.append(character)
        else:
            self._token += character

    def _end_value(self) -> None:
        if self._key == "name":
            name = _text_of(self._token)
            if name in self._names:
                self.name = name
            else:
                self.state = State.TEXT
        self._key = None
        self._token = ""

    def _finish(self) -> None:
        if self.state is not State.READING:
            return
        if self.name is None:
            self.state = State.TEXT
            return
        self.state = State.CALL
        if self._as_text:
            self._arguments = [whole_characters(_text_of("".join(self._arguments)) or "{}")]
        elif not self._has_arguments:
            self._arguments = ["{}"]


def _text_of(token: str) -> str | None:
    """The value of a JSON string, None when it is none."""
    try:
        value = json.loads(token)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


class Calls:
    """Reads one such call after another. Mutated by one parser."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
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
            pieces.append(Piece(name=name, arguments=arguments))
        if scanner.state is State.READING:
            return State.READING, rest
        self._scanner = None
        if scanner.state is State.TEXT and not scanner.has_name:
            pieces.append(Piece(scanner.raw))
        return scanner.state, rest

    def finish(self) -> list[Piece]:
        """An object that was cut becomes text, unless its name has been sent."""
        scanner, self._scanner = self._scanner, None
        return [Piece(scanner.raw)] if scanner is not None and not scanner.has_name and scanner.raw else []


class BracketScanner:
    """Finds where what begins with a bracket ends, such as a JSON object. Mutated by its owner.

    Attributes:
      is_whole: the closing bracket has been seen.
    """

    def __init__(self, brackets: str = "{}[]", quotes: str = '"') -> None:
        """`brackets`: pairs of them; `quotes`: characters between which brackets do not count."""
        self.is_whole = False
        self._opening, self._closing, self._quotes = brackets[::2], brackets[1::2], quotes
        self._depth = 0
        self._quote = ""  # within a text: its quote
        self._escaped = False

    def push(self, text: str) -> int:
        """Takes more text; returns how many characters of it belong to the value."""
        for place, character in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in self._quotes:
                self._quote = character
            elif character in self._opening:
                self._depth += 1
            elif character in self._closing:
                self._depth -= 1
                if self._depth == 0:
                    self.is_whole = True
                    return place + 1
        return len(text)
