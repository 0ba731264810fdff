"""`Piece`, an increment of an answer; the protocol of parsers; the counter of calls; what a format says of itself."""

import dataclasses
import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

# The functions that were offered: of each name the JSON schema of its arguments.
Functions = Mapping[str, Mapping[str, Any]]
_NULL = "null"


class Piece(NamedTuple):
    """An increment: text for the reader; or a thought; or of a call: its name with the first piece of it, then
    arguments, which are JSON when all of them are joined.

    The pieces of one call follow each other. Parsers of formats leave `call` alone: it is the number of the call in its
    answer, which `NumberedCalls` finds.
    """

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""
    reasoning: str = ""


class AnswerParser(Protocol):
    """Fed text, gives pieces. Belongs to one sequence."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """Returns what was held back, once no text follows."""
        ...


ParserMaker = Callable[[], AnswerParser]


class NumberedCalls:
    """The pieces of a parser with the numbers of their calls, and `{}` for arguments that are null or blank.

    One counter for all formats: the number of a call is the number of names before it, however many lists or marks the
    calls came in. Clients pass arguments on by name, and null has no names. Belongs to one sequence.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._num_calls = 0
        self._held: str | None = None  # the beginning of the last call's arguments, as long as they may be null

    def push(self, text: str) -> list[Piece]:
        return self._read(self._parser.push(text))

    def finish(self) -> list[Piece]:
        return [*self._read(self._parser.finish()), *self._end()]

    def _read(self, pieces: Iterable[Piece]) -> list[Piece]:
        told: list[Piece] = []
        for piece in pieces:
            if piece.name is not None:
                told += self._end()
                self._num_calls += 1
                self._held = ""
                arguments = self._take(piece.arguments)
                told.append(piece._replace(call=self._num_calls - 1, arguments=arguments))
            elif piece.arguments:
                arguments = self._take(piece.arguments)
                told += [self._of_last(arguments)] if arguments else []
            else:
                told += [*self._end(), piece]
        return told

    def _of_last(self, arguments: str) -> Piece:
        return Piece(call=self._num_calls - 1, arguments=arguments)

    def _take(self, arguments: str) -> str:
        """What can be told of the arguments once these have come."""
        if self._held is None:
            return arguments
        self._held += arguments
        if _NULL.startswith(self._held.strip()):
            return ""
        told, self._held = self._held, None
        return told

    def _end(self) -> list[Piece]:
        """The last call, if there is one, is whole, or was cut."""
        held, self._held = self._held, None
        if not held:
            return []
        return [self._of_last("{}" if held.strip() in ("", _NULL) else held)]


def new_call_id() -> str:
    """An id for a call, as OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
      make: a parser of answers in which these functions may be called. Its calls are numbered.
      tags: texts that the model writes around calls; if they are special tokens, they must not be skipped.
      is_taught: whether a chat template (its source) has the model write in this format.
      has_channels: every answer is written in the format, with tools or without, and so are its thoughts.
      new_call_id: makes ids that the templates of these models accept.
      reads_bare_calls: an object that is exactly a call is one where its marks are missing, too (see `bare`).
      grammar: makes a Lark grammar of answers in which every call fits the schema of its function; with a schema of
        answers, one of answers that are either calls or fit it. None: none is known.
    """

    make: Callable[[Functions], AnswerParser]
    tags: Sequence[str]
    is_taught: Callable[[str], bool]
    has_channels: bool = False
    new_call_id: Callable[[], str] = new_call_id
    reads_bare_calls: bool = False
    grammar: Callable[[Functions, Mapping[str, Any] | None], str] | None = None

    def __post_init__(self) -> None:
        parser_of = self.make
        object.__setattr__(self, "make", lambda functions: NumberedCalls(parser_of(functions)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingFormat:
    """A format of thoughts: between two tags, at the beginning of an answer.

    Attributes:
      open, close: the tags.
      is_taught: whether a chat template (its source) has the model think so.
      always: the model thinks even if neither the prompt nor the answer has the opening tag.
    """

    open: str
    close: str
    is_taught: Callable[[str], bool]
    always: bool = False

    def has_begun(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within a thought."""
        end = prompt.rstrip()
        return end.endswith(self.open) or (self.always and not end.endswith(self.close))


class NoCalls:
    """All text is text: no tools were offered."""

    def push(self, text: str) -> list[Piece]:
        return [Piece(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for what is none: JSON knows no NaN, and no number without an end."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value


def write_json(value: Any) -> str:
    """Raises ValueError for what JSON has no words for."""
    return whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))


def whole_characters(text: str) -> str:
    """The text with each pair of surrogates as its character, and U+FFFD for half of one, which no answer can carry."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def may_begin(text: str, tags: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of the tags."""
    longest = max(map(len, tags)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return size
    return 0


def first_of(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """The place of the tag that comes first, and the tag; (-1, "") when there is none."""
    found = [(text.find(tag), tag) for tag in tags if tag in text]
    return min(found) if found else (-1, "")


class Spaced:
    """Text between calls or behind a thought: white space at its beginning and before a call is left out.

    Mutated by one parser.
    """

    def __init__(self) -> None:
        self._held = ""  # white space, which is told when text follows
        self.has_text = False

    def push(self, text: str) -> list[Piece]:
        """Text that goes on."""
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if not shown:
            return []
        self.has_text = True
        return [Piece(shown)]

    def end(self) -> None:
        """A call follows."""
        self._held = ""

    def finish(self) -> list[Piece]:
        """No text follows: white space at the very end belongs to the answer, if it has text."""
        held, self._held = self._held, ""
        return [Piece(held)] if held and self.has_text else []
