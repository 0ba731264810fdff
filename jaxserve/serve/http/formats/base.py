"""`Piece`, an increment of an answer; the protocol of parsers; and what a format says of itself."""

import dataclasses
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

# The functions that were offered: of each name the JSON schema of its arguments.
Functions = Mapping[str, Mapping[str, Any]]


class Piece(NamedTuple):
    """An increment: text for the reader; or a thought; or of call number `call`: its name with the first piece of it,
    then arguments, which are JSON when all of them are joined."""

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


def new_call_id() -> str:
    """An id for a call, as OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
      make: a parser of answers in which these functions may be called.
      tags: texts that the model writes around calls; if they are special tokens, they must not be skipped.
      is_taught: whether a chat template (its source) has the model write in this format.
      has_channels: every answer is written in the format, with tools or without, and so are its thoughts.
      new_call_id: makes ids that the templates of these models accept.
      grammar: makes a Lark grammar of answers in which every call fits the schema of its function; with a schema of
        answers, one of answers that are either calls or fit it. None: none is known.
    """

    make: Callable[[Functions], AnswerParser]
    tags: Sequence[str]
    is_taught: Callable[[str], bool]
    has_channels: bool = False
    new_call_id: Callable[[], str] = new_call_id
    grammar: Callable[[Functions, Mapping[str, Any] | None], str] | None = None


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
